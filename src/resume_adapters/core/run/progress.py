"""How far a run is, and how fast it goes."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

_WINDOW = 60
"""Seconds over which the rate is taken."""


class Progress(NamedTuple):
    """How far a run is: optimizer steps and epochs completed, and the steps after which it is finished, where known."""

    step: int
    epoch: float
    horizon: int | None = None


class StepRate:
    """How fast a run goes, over the last minute, with all that keeps it waiting."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque(maxlen=_WINDOW)

    def note(self, now: float, step: int) -> None:
        """Note the step at a moment; once a second or so."""
        self._seen.append((now, step))

    @property
    def rate(self) -> float | None:
        """Optimizer steps a second; ``None`` until that is known."""
        if len(self._seen) < 2:
            return None
        (first, from_step), (last, to_step) = self._seen[0], self._seen[-1]
        return (to_step - from_step) / (last - first) if last > first else None
