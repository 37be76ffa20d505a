"""Once a second, on a thread of its own: what may ask a run to stop, and what is said of how it goes.

The training thread does nothing for it but note the step it has completed. Files, processes and clocks are looked at
here.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

_PERIOD = 1.0
_WINDOW = 60
"""Seconds over which the rate is taken."""


class Heartbeat:
    """Does a few short things once a second.

    Args:
        duties: what it does, in this order. None may wait for the training thread or for another rank.
    """

    def __init__(self, duties: Sequence[Callable[[], None]]) -> None:
        self._duties = duties
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="resume-adapters-heartbeat", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End; when this returns, nothing more is done."""
        self._ended.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._ended.wait(_PERIOD):
            for duty in self._duties:
                duty()


class Progress(NamedTuple):
    """How far a run is: optimizer steps and epochs completed, and the steps after which it is finished, where known."""

    step: int
    epoch: float
    horizon: int | None = None


class Pace:
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
