"""The stop flag of a process, and the signal handlers that set it. A handler only sets the flag.

The handlers are those of the training process alone. A child that it forks (a pool in a metric, a loader's worker) gets
the handlers of before the run: with a flag that nobody reads, it could not be terminated.
"""

from __future__ import annotations

import enum
import functools
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

from resume_adapters.core.stop.policy import StopOn

ANOTHER_RANK = "another rank was asked to stop"
"""The reason on a rank that was not asked itself."""


class StopLevel(enum.IntEnum):
    """What a rank asks for; all ranks do the highest that one of them asks for."""

    GO_ON = 0
    STOP = 1
    HALT = 2


class StopFlag:
    """The stop flag of one process, and the signal handlers that set it.

    Attributes:
        reason: why to stop; ``None`` until a stop is requested.
        halted: a human must look at the run before it is launched again.
    """

    def __init__(self, on: StopOn) -> None:
        self.on = on
        self.reason: str | None = None
        self.halted = False
        self._interrupted = False
        self._previous: dict[signal.Signals, Any] = {}
        self._process = os.getpid()

    def install(self) -> None:
        """Install the handlers: not for SIGINT in an interactive interpreter, and none outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._process = os.getpid()
        _restore_in_children()
        _INSTALLED[self] = None
        interactive = hasattr(sys, "ps1") or sys.flags.interactive
        for number in self.on.signals:
            if number not in self._previous and not (number is signal.SIGINT and interactive):
                self._previous[number] = signal.signal(number, self._handle)

    def uninstall(self) -> None:
        """Restore the previous handlers."""
        _INSTALLED.pop(self, None)
        while self._previous:
            number, handler = self._previous.popitem()
            # Python cannot restore a handler that was not installed from Python.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def request(self, reason: str) -> None:
        """Request a stop; the first reason is kept."""
        if self.reason is None:
            self.reason = reason

    def halt(self, reason: str) -> None:
        """Request a stop after which a human must look at the run; its reason replaces that of a plain stop."""
        if not self.halted:
            self.reason, self.halted = reason, True

    @property
    def level(self) -> StopLevel:
        """What this process votes for."""
        if self.halted:
            return StopLevel.HALT
        return StopLevel.GO_ON if self.reason is None else StopLevel.STOP

    def apply(self, level: StopLevel) -> None:
        """Set the flag to what the ranks agreed on."""
        if level is StopLevel.HALT and not self.halted:
            self.halt(ANOTHER_RANK)
        elif level is StopLevel.STOP:
            self.request(ANOTHER_RANK)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a signal that came before a forked child restored the handlers
            self.uninstall()
            os.kill(os.getpid(), number)
            return
        if number == signal.SIGINT:
            if self._interrupted:
                raise KeyboardInterrupt("second SIGINT: leaving at once, without saving")
            self._interrupted = True
        self.request(signal.Signals(number).name)


_INSTALLED: dict[StopFlag, None] = {}
"""The flags whose handlers are installed in this process, oldest first."""


@functools.cache
def _restore_in_children() -> None:
    """Restore the previous handlers in each child that is forked from now on; Python cannot undo this registration."""
    os.register_at_fork(after_in_child=_uninstall_all)


def _uninstall_all() -> None:
    for flag in reversed(list(_INSTALLED)):  # the previous handlers of a later one may be those of an earlier one
        flag.uninstall()
