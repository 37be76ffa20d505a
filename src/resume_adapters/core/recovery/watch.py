"""The thread that looks for the failure of a peer, ends what this rank waits for, and leads its main thread out.

Whatever the process does then, also where a library keeps Python's lock, it ends within a limit.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType

from resume_adapters.core.log import logger
from resume_adapters.core.recovery.attempt import LeftByPeer

THREAD_NAME = "resume-adapters-recovery"

_LOOK_EVERY = 0.02
"""Seconds between two looks."""

_SIGNAL = "SIGURG"
"""What wakes the main thread. Where nobody handles it, it is ignored."""

_RAISING = 5.0
"""Seconds for which an interruption that is on its way is waited for."""


class Interruption:
    """Raises :class:`LeftByPeer` in the main thread, if that has made it: elsewhere nothing is interrupted.

    That ends a sleep, and the wait for a lock, a thread or a file. A call of a library that does not return goes on.
    """

    def __init__(self) -> None:
        self._is_main = threading.current_thread() is threading.main_thread()
        self._is_allowed = self._is_raising = False

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Let :meth:`interrupt` interrupt while the context lasts.

        Raises:
            LeftByPeer: it has.
        """
        if not self._is_main:
            yield
            return
        number = getattr(signal, _SIGNAL)
        former = signal.signal(number, self._handle)
        self._is_allowed = True
        try:
            yield
        finally:
            self._forbid()
            signal.signal(number, signal.SIG_DFL if former is None else former)

    def interrupt(self) -> None:
        """Interrupt the main thread, if that is allowed; another thread calls it."""
        self._is_raising = True
        try:
            if self._is_allowed:
                signal.pthread_kill(threading.main_thread().ident or 0, getattr(signal, _SIGNAL))
        finally:
            self._is_raising = False

    def _forbid(self) -> None:
        while True:
            with contextlib.suppress(LeftByPeer):  # it was on its way
                self._is_allowed = False
                ends = time.monotonic() + _RAISING
                while self._is_raising and time.monotonic() < ends:
                    time.sleep(0.001)
                return

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_allowed:
            raise LeftByPeer


class PeerWatch:
    """Watches over what a thread does together with other ranks, from :meth:`start` to :meth:`close`.

    Args:
        is_announced: returns whether a rank has failed.
        leave: ends what this rank waits for, when one has.
        cut: ends it again, until the watch is closed: a thread may have been about to wait.
        abandon: ends this process; called with what the thread is not through with, and the seconds that it had.
        limit: seconds after a failure in which the thread must leave :meth:`leading_out`.
        look: is called again and again, as long as no rank has failed; returns within how many seconds it must be
            called again, or the process ends: a library keeps Python's lock. ``None``: it need not.
    """

    def __init__(
        self,
        is_announced: Callable[[], bool],
        leave: Callable[[], object],
        cut: Callable[[], object],
        abandon: Callable[[str, float], object],
        limit: float,
        look: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._is_announced = is_announced
        self._leave = leave
        self._cut = cut
        self._abandon = abandon
        self._limit = limit
        self._look = look
        self._has_complained = False
        self._guarded: float | None = None
        self._interruption = Interruption()
        self._grace: float | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=THREAD_NAME, daemon=True)

    def start(self) -> None:
        """Begin to watch the calling thread."""
        self._thread.start()

    def close(self) -> None:
        """Watch no longer."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join(self._limit)  # a hook of the user may hang there
        self._guard(None)

    @contextlib.contextmanager
    def leading_out(self, grace: float) -> Iterator[None]:
        """Lead the watched thread out of the context, once a rank has failed.

        Args:
            grace: seconds in which it may reach the end of its step by itself; it is interrupted after each of them.

        Raises:
            LeftByPeer: it was interrupted.
        """
        with self._interruption.allowed():
            self._grace = grace
            try:
                yield
            finally:
                self._grace = None

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_EVERY):
            if self._is_announced():
                self._guarded = None
                self._guard(self._limit + LATER)
                try:
                    self._leave()
                finally:  # whatever a hook of the user does
                    self._lead_out()
                return
            self._look_once()

    def _look_once(self) -> None:
        try:
            self._guard(self._look())
        except Exception:  # of any kind: no other thread sees that a peer fails
            if not self._has_complained:
                logger.error("Ranks that hang may not be found:\n%s", traceback.format_exc())
            self._has_complained = True

    def _guard(self, seconds: float | None) -> None:
        now = time.monotonic()
        if seconds is None and self._guarded is not None:
            self._guarded = None
            end_process_after(None)
        elif seconds is not None and (self._guarded is None or now > self._guarded + min(1.0, seconds / 10)):
            self._guarded = now
            end_process_after(seconds)

    def _lead_out(self) -> None:
        began = interrupted = time.monotonic()
        while not self._over.wait(_LOOK_EVERY):
            self._cut()
            now, grace = time.monotonic(), self._grace
            if grace is None:
                continue
            if now > began + self._limit:
                self._abandon("leave its step", self._limit)
            elif now > interrupted + grace:
                interrupted = now
                self._interruption.interrupt()


# ---- When this process ends in any case

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
