"""How far a run is, and how fast it goes."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

_WINDOW = 60
"""Seconds over which the rate is taken."""


class Progress(NamedTuple):
    """Optimizer steps and epochs completed, and the number of steps after which the run is finished, if known."""

    step: int
    epoch: float
    horizon: int | None = None


class StepRate:
    """Optimizer steps a second over the last minute, pauses included."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque(maxlen=_WINDOW)

    def add(self, now: float, step: int) -> None:
        """Add the step reached at a time; about once a second."""
        self._seen.append((now, step))

    @property
    def rate(self) -> float | None:
        """Optimizer steps a second; ``None`` until it is known."""
        if len(self._seen) < 2:
            return None
        (first, from_step), (last, to_step) = self._seen[0], self._seen[-1]
        return (to_step - from_step) / (last - first) if last > first else None
