"""The stop flags of a process, and the signal handlers that set them. A handler only sets flags.

A signal means the process, so it sets the flag of every run that is open in it, and the handlers of before are restored
when the last of them has closed, in whatever order they close.

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
    """The stop flag of one run in one process.

    Attributes:
        on: the signals that set it are part of it.
        reason: why to stop; ``None`` until a stop is requested.
        halted: a human must look at the run before it is launched again.
    """

    def __init__(self, on: StopOn) -> None:
        self.on = on
        self.reason: str | None = None
        self.halted = False
        self._interrupted = False

    def install(self) -> None:
        """Install the handlers: not of SIGINT in an interactive interpreter, and none outside the main thread."""
        if threading.current_thread() is threading.main_thread():
            _HANDLERS.add(self)

    def uninstall(self) -> None:
        """Remove the handlers, and restore the previous ones of signals that no other flag waits for."""
        _HANDLERS.remove(self)

    def request(self, reason: str) -> None:
        """Request a stop; the first reason is kept."""
        if self.reason is None:
            self.reason = reason

    def halt(self, reason: str) -> None:
        """Request a stop after which a human must look at the run; its reason replaces that of a plain stop."""
        if not self.halted:
            self.reason, self.halted = reason, True

    def continue_from(self, former: StopFlag) -> None:
        """Ask for what the flag of a call before has asked for, which was not answered."""
        self.reason, self.halted = former.reason, former.halted

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

    def notice(self, number: int) -> bool:
        """Request a stop because of a signal, and return whether it is the second SIGINT."""
        again = number == signal.SIGINT and self._interrupted
        self._interrupted = self._interrupted or number == signal.SIGINT
        self.request(signal.Signals(number).name)
        return again


class _Handlers:
    """The handlers of this process: one for all flags, and the previous one of each signal."""

    def __init__(self) -> None:
        self._flags: dict[StopFlag, None] = {}
        self._previous: dict[int, Any] = {}
        self._process = os.getpid()

    def add(self, flag: StopFlag) -> None:
        """Install the handlers of a flag's signals."""
        self._process = os.getpid()
        _restore_in_children()
        self._flags[flag] = None
        for number in _signals_of(flag):
            if signal.getsignal(number) != self._handle:
                self._previous[number] = signal.signal(number, self._handle)

    def remove(self, flag: StopFlag) -> None:
        """Remove a flag; a signal for which none is left gets its previous handler."""
        self._flags.pop(flag, None)
        for number in set(self._previous).difference(*map(_signals_of, self._flags)):
            if signal.getsignal(number) == self._handle:  # what replaced it may still call it
                signal.signal(number, self._before(number))

    def restore(self) -> None:
        """Restore the previous handlers of all signals."""
        for flag in list(self._flags):
            self.remove(flag)

    def _before(self, number: int) -> Any:
        handler = self._previous[number]
        return signal.SIG_DFL if handler is None else handler  # None: it was not installed from Python

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # it came before a forked child restored the handlers
            self.restore()
        waiting = [flag for flag in self._flags if number in flag.on.signals]
        interrupted = [flag for flag in waiting if flag.notice(number)]
        if interrupted:
            raise KeyboardInterrupt("second SIGINT: leaving at once, without saving")
        if not waiting:
            self._forward(number, frame)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        handler = self._before(number)
        if callable(handler):
            handler(number, frame)
        elif handler == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def _signals_of(flag: StopFlag) -> list[signal.Signals]:
    interactive = hasattr(sys, "ps1") or bool(sys.flags.interactive)
    return [number for number in flag.on.signals if not (number is signal.SIGINT and interactive)]


_HANDLERS = _Handlers()


@functools.cache
def _restore_in_children() -> None:
    """Restore the previous handlers in each child that is forked from now on; Python cannot undo this registration."""
    os.register_at_fork(after_in_child=_HANDLERS.restore)
