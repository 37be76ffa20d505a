"""When a training has last done something."""

from __future__ import annotations

import time


class Pulse:
    """The signs of life of one attempt: the ends of its steps, and what it does between two of them.

    Attributes:
        slowest: seconds from one end of a step to the next, at most.
    """

    def __init__(self) -> None:
        self.slowest = 0.0
        self._last: float | None = None
        self._last_step: float | None = None

    def end_step(self) -> None:
        """Count the end of a step."""
        now = time.monotonic()
        if self._last_step is not None:
            self.slowest = max(self.slowest, now - self._last_step)
        self._last = self._last_step = now

    def beat(self) -> None:
        """Count something else that shows that the training goes on: a batch of an evaluation, a save."""
        if self._last is not None:
            self._last = time.monotonic()

    def stop(self) -> None:
        """The training has ended: no step is to come."""
        self._last = None

    def silence(self, now: float) -> float | None:
        """Return the seconds since the last sign of life; ``None`` before the first step, and after the training."""
        last = self._last
        return None if last is None else now - last
