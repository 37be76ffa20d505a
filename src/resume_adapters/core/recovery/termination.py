"""SIGTERM while the ranks of a block agree: it stops the next attempt, as it stops a training."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any


class Termination:
    """Keeps this process from ending by SIGTERM while the ranks agree how to go on, and write what they hold.

    A training call has a handler of its own, which is above this one.

    Attributes:
        has_come: the signal has come, and had no effect yet.
    """

    def __init__(self) -> None:
        self._previous: Any = None
        self._is_armed = self._is_deferred = self.has_come = False

    def arm(self) -> None:
        """Handle the signal, from when a training call begins; a no-op outside of the main thread.

        Before that it ends the process at once, which Python's handlers do not where a process waits for another one.
        """
        if not self._is_armed and threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._handle)
            self._is_armed = True

    def defer(self) -> None:
        """Do not end by the signal from now on; any thread may call it."""
        self._is_deferred = True

    def release(self, *, is_taken: bool = False) -> bool:
        """Handle the signal no longer; return whether it has come.

        Args:
            is_taken: the caller does what it asks for; otherwise it has its effect now.
        """
        if self._is_armed and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._previous is None else self._previous)
        has_come = self.has_come
        self._is_armed = self._is_deferred = self.has_come = False
        if has_come and not is_taken:
            os.kill(os.getpid(), signal.SIGTERM)
        return has_come

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.has_come = True
        if not self._is_deferred:
            self.release()
