"""When this process ends whatever it does: also where a library keeps Python's lock."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator

LATER = 5.0
"""Seconds after a limit at which the process ends without Python: what ends it as a rule says more."""

_STDERR = 2


def end_process_after(seconds: float | None) -> None:
    """End this process with status 1 in so many seconds, after the stacks of its threads; ``None``: do not.

    A thread in C does that. The last call counts. A process that is forked meanwhile is not ended.
    """
    _stop_while_forking()
    _TIMER.ends = None if seconds is None else time.monotonic() + seconds
    _TIMER.apply()


class _Timer:
    """The one timer that ``faulthandler`` has."""

    def __init__(self) -> None:
        self.ends: float | None = None
        self.is_forking = False

    def apply(self) -> None:
        if self.is_forking:
            return
        if self.ends is None:
            faulthandler.cancel_dump_traceback_later()
        else:
            seconds = max(self.ends - time.monotonic(), 0.001)
            faulthandler.dump_traceback_later(seconds, exit=True, file=_STDERR)

    def before_fork(self) -> None:
        # A child would wait for the timer's thread, which it lacks, at its end: for ever.
        if self.ends is not None:
            self.is_forking = True
            faulthandler.cancel_dump_traceback_later()

    def after_fork(self) -> None:
        if self.is_forking:
            self.is_forking = False
            self.apply()

    def in_child(self) -> None:
        self.ends, self.is_forking = None, False


_TIMER = _Timer()


@functools.cache
def _stop_while_forking() -> None:
    """Register that; Python cannot undo it."""
    os.register_at_fork(before=_TIMER.before_fork, after_in_parent=_TIMER.after_fork, after_in_child=_TIMER.in_child)


@contextlib.contextmanager
def limited(doing: str, seconds: float, abandon: Callable[[str, float], object]) -> Iterator[None]:
    """End this process where the context lasts longer.

    Args:
        doing: what is done in the context, for the message.
        seconds: the limit.
        abandon: ends the process, called with both on another thread; where it cannot run, the process ends anyway.
    """
    timer = threading.Timer(seconds, abandon, (doing, seconds))
    timer.daemon = True
    timer.start()
    end_process_after(seconds + LATER)
    try:
        yield
    finally:
        timer.cancel()
        end_process_after(None)
