"""The stop flag of a process, and the signal handlers that set it. A handler only sets the flag."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import Any

from resume_adapters.core.stop.policy import StopOn

_NOTHING, _STOP, _HALT = 0, 1, 2

_ELSEWHERE = "another rank was asked to stop"


class StopFlag:
    """The flag of one process, and the handlers that set it.

    Attributes:
        reason: why to stop; ``None`` as long as nothing asked for it.
        halted: a human must look at the run before it goes on.
    """

    def __init__(self, on: StopOn) -> None:
        self.on = on
        self.reason: str | None = None
        self.halted = False
        self._interrupted = False
        self._previous: dict[signal.Signals, Any] = {}

    def install(self) -> None:
        """Take the signals over. In an interactive interpreter SIGINT is left alone; off the main thread, all are."""
        if threading.current_thread() is not threading.main_thread():
            return
        interactive = hasattr(sys, "ps1") or sys.flags.interactive
        for number in self.on.signals:
            if number not in self._previous and not (number is signal.SIGINT and interactive):
                self._previous[number] = signal.signal(number, self._handle)

    def uninstall(self) -> None:
        """Put the previous handlers back."""
        while self._previous:
            number, handler = self._previous.popitem()
            # A handler that was not installed from python cannot be put back from python.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def request(self, reason: str) -> None:
        """Ask for a stop; the first reason stays."""
        if self.reason is None:
            self.reason = reason

    def halt(self, reason: str) -> None:
        """Ask for a stop that a human must look at; its reason counts for more than that of a plain stop."""
        if not self.halted:
            self.reason, self.halted = reason, True

    @property
    def level(self) -> int:
        """What this process asks for, as a vote: the highest of all ranks is what they do."""
        return _HALT if self.halted else _NOTHING if self.reason is None else _STOP

    def heed(self, level: int) -> None:
        """Take over what the ranks agreed on."""
        if level == _HALT and not self.halted:
            self.halt(_ELSEWHERE)
        elif level == _STOP:
            self.request(_ELSEWHERE)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self._interrupted:
                raise KeyboardInterrupt("second SIGINT: leaving at once, without saving")
            self._interrupted = True
        self.request(signal.Signals(number).name)
