"""Signals that come to the supervisor of a training process, and whether that process has got them by itself.

A launcher or a scheduler sends a signal to all processes of a job, and a user to one of them. Python writes the number
of each signal that it handles to a descriptor: so the supervisor learns what came to the training process, too, and
passes on what did not.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

_NAMES = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")

PASSED_ON = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
"""The signals that ask a process to end or to save, as far as the system has them. One that it dies of is no fault."""

_TOGETHER = 0.2
"""Seconds within which a signal that is sent to all processes of a job comes to all of them."""


class Pipe:
    """A pipe whose reader never waits. The reader keeps both ends open, so it has no end of file.

    Args:
        is_patient: who writes waits where it is full.

    Attributes:
        reading: the descriptor of one end.
        writing: that of the other.
    """

    def __init__(self, *, is_patient: bool = False) -> None:
        self.reading, self.writing = os.pipe()
        os.set_blocking(self.reading, False)
        os.set_blocking(self.writing, is_patient)

    def read(self) -> bytes:
        """Return what has been written."""
        with contextlib.suppress(BlockingIOError):
            return os.read(self.reading, 65536)
        return b""

    def close(self) -> None:
        """Close both ends."""
        os.close(self.reading)
        os.close(self.writing)


class Arrivals:
    """Which signals came to the supervisor and to the training process, and when. Pure."""

    def __init__(self) -> None:
        self._due: dict[int, float] = {}
        self._seen: dict[int, float] = {}

    def add(self, number: int, now: float) -> None:
        """Know that a signal came to the supervisor."""
        if now > self._seen.get(number, float("-inf")) + _TOGETHER:
            self._due.setdefault(number, now + _TOGETHER)

    def add_seen(self, number: int, now: float) -> None:
        """Know that a signal came to the training process."""
        self._seen[number] = now
        self._due.pop(number, None)

    def take_due(self, now: float) -> list[int]:
        """Return the signals to pass on now, once."""
        due = [number for number, at in self._due.items() if at <= now]
        for number in due:
            self.add_seen(number, now)
        return due

    def seconds(self, now: float) -> float | None:
        """Return for how long nothing is to be passed on; ``None``: until a signal comes."""
        return max(0.0, min(self._due.values()) - now) if self._due else None


class SignalRelay:
    """Keeps a supervisor from ending by a signal.

    Attributes:
        own: the signals that came to the supervisor; their numbers, as bytes.
    """

    def __init__(self) -> None:
        self.own = Pipe()
        self._former: dict[int, Any] = {each: signal.getsignal(each) for each in PASSED_ON}

    def enter(self) -> None:
        """Handle the signals as a supervisor does; the main thread calls it."""
        for number in PASSED_ON:
            signal.signal(number, _do_nothing)
        signal.set_wakeup_fd(self.own.writing, warn_on_full_buffer=False)

    def leave(self, seen: int) -> None:
        """Handle the signals as before, in a process that was forked.

        Args:
            seen: the descriptor to which the numbers of those are written that come to this process.
        """
        self.own.close()
        signal.set_wakeup_fd(seen, warn_on_full_buffer=False)
        for number, handler in self._former.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not installed from Python


def _do_nothing(number: int, frame: object) -> None:
    """Let the signal be written to the descriptor alone."""
