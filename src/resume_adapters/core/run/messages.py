"""What a run says while it trains: what it saves, why it stops, and where it stopped."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from resume_adapters.core.log import logger

_PERIOD = 60.0
"""Least seconds between two messages of saves."""

_LONG = 1.0
"""Seconds of a wait that is worth a message."""


class RunMessages:
    """Says each thing once, on the rank that speaks for all.

    Args:
        speaks: this is that rank.
        clock: returns seconds, from any start.
    """

    def __init__(self, *, speaks: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._speaks = speaks
        self._clock = clock
        self._stopping = threading.Lock()
        self._said: float | None = None
        self._unsaid = 0

    def committed(self, name: str, place: str) -> None:
        """Log that a checkpoint is committed; at most once a minute. Called on the thread that commits.

        Args:
            place: where in the data it is, in words.
        """
        if not self._speaks:
            return
        now = self._clock()
        if self._said is not None and now - self._said < _PERIOD:
            self._unsaid += 1
            return
        since = f" ({self._unsaid} more since the last such line)" if self._unsaid else ""
        self._said, self._unsaid = now, 0
        logger.info("%s saved at %s%s.", name, place or "its step", since)

    def staging(self, decision: str) -> None:
        """Log that saves are not copied in memory, as the user has asked, and why."""
        if self._speaks:
            logger.warning('stage="memory" is %s.', decision)

    def waited(self, seconds: float) -> None:
        """Log how long a save has waited for the commit before it, where that is long."""
        if self._speaks and seconds >= _LONG:
            logger.info("waited %.1f s for the commit of the save before this one.", seconds)

    def stopping(self, reason: str) -> None:
        """Log that the run will save and leave. Called on any thread, as soon as this rank knows."""
        if self._speaks and self._stopping.acquire(blocking=False):
            logger.info("%s: saving at the end of this step ...", reason)

    def stopped(self, step: int, checkpoint: str | None) -> None:
        """Log where the run has stopped.

        Args:
            checkpoint: the newest one, from which the next launch resumes; ``None`` where there is none.
        """
        if not self._speaks:
            return
        if checkpoint is None:
            logger.info("stopped at step %d, before anything was saved; the same command starts again", step)
        else:
            logger.info("stopped at step %d (%s); the same command resumes", step, checkpoint)

    def halted(self, step: int, reason: str, release: str) -> None:
        """Log where the run was halted, and what lets it continue.

        Args:
            reason: what a human should look at.
            release: the command that lets the run start again.
        """
        if self._speaks:
            logger.warning("halted at step %d: %s. To continue it, run `%s`", step, reason, release)
