"""The thread that looks for the failure of a peer, ends what this rank waits for, and leads its main thread out."""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from resume_adapters.core.log import logger
from resume_adapters.core.recovery.interruption import Interruption

THREAD_NAME = "resume-adapters-recovery"

_LOOK_EVERY = 0.02
"""Seconds between two looks."""


@dataclass(frozen=True)
class _Stage:
    """What the watched thread is to be through with.

    Attributes:
        doing: what it does, for the message.
        limit: seconds for it.
        grace: seconds between two interruptions; ``None``: it is not interrupted.
    """

    doing: str
    limit: float
    grace: float | None = None


class PeerWatch:
    """Watches over what a thread does together with other ranks, from :meth:`start` to :meth:`close`.

    Args:
        is_announced: returns whether a rank has failed.
        leave: ends what this rank waits for, when one has.
        cut: ends it again, until the watch is closed: a thread may have been about to wait.
        abandon: ends this process; called with what the thread is not through with in time.
        look: is called again and again, as long as no rank has failed.
    """

    def __init__(
        self,
        is_announced: Callable[[], bool],
        leave: Callable[[], object],
        cut: Callable[[], object],
        abandon: Callable[[str], object],
        look: Callable[[], object] = bool,
    ) -> None:
        self._is_announced = is_announced
        self._leave = leave
        self._cut = cut
        self._abandon = abandon
        self._look = look
        self._has_complained = False
        self._interruption = Interruption()
        self._stage: _Stage | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=THREAD_NAME, daemon=True)

    def start(self) -> None:
        """Begin to watch the calling thread."""
        self._thread.start()

    def close(self) -> None:
        """Watch no longer."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()

    @contextlib.contextmanager
    def leading_out(self, grace: float, limit: float) -> Iterator[None]:
        """Interrupt the watched thread while the context lasts, once a rank has failed.

        Args:
            grace: seconds in which it may reach the end of its step by itself; it is interrupted after each of them.
            limit: further seconds in which it must leave the context, or its process is ended.

        Raises:
            LeftByPeer: it was interrupted.
        """
        with self._interruption.allowed(), self._at(_Stage("leave its step", grace + limit, grace)):
            yield

    def limited(self, doing: str, limit: float) -> contextlib.AbstractContextManager[None]:
        """End the process where the context lasts longer than that, once a rank has failed.

        Args:
            doing: what is done in the context, for the message.
            limit: seconds.
        """
        return self._at(_Stage(doing, limit))

    @contextlib.contextmanager
    def _at(self, stage: _Stage) -> Iterator[None]:
        self._stage = stage
        try:
            yield
        finally:
            self._stage = None

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_EVERY):
            if self._is_announced():
                try:
                    self._leave()
                finally:  # whatever a hook of the user does
                    self._lead_out()
                return
            self._look_once()

    def _look_once(self) -> None:
        try:
            self._look()
        except Exception:  # of any kind: no other thread sees that a peer fails
            if not self._has_complained:
                logger.error("Ranks that hang may not be found:\n%s", traceback.format_exc())
            self._has_complained = True

    def _lead_out(self) -> None:
        stage, began, interrupted = self._stage, time.monotonic(), time.monotonic()
        while not self._over.wait(_LOOK_EVERY):
            self._cut()
            now = time.monotonic()
            if self._stage is not stage:
                stage, began, interrupted = self._stage, now, now
            if stage is None:
                continue
            if now > began + stage.limit:
                self._abandon(stage.doing)
            elif stage.grace is not None and now > interrupted + stage.grace:
                interrupted = now
                self._interruption.interrupt()
