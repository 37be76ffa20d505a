"""How often a run saves: by steps, by time, or at the interval of Young and Daly.

Pure: every time is an argument, in seconds of one clock. If the answer depends on the clock, rank zero gives it, and
the vote on a stop carries it to the other ranks (``stop/vote.py``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any, Literal

from resume_adapters.errors import UnsupportedSetting

SaveEvery = int | timedelta | Literal["auto"]
"""Optimizer steps, a time, or ``"auto"``."""

SHORTEST, LONGEST = timedelta(minutes=1), timedelta(hours=1)
"""Bounds of ``"auto"``: a shorter interval gains little; a longer one risks too much on an estimate."""

SHORTEST_IN_MEMORY = timedelta(seconds=5)
"""The lower bound of ``"auto"`` for saves to memory, which cost little."""

_PRIOR = 24 * 3600.0
"""Seconds between failures of which ``"auto"`` assumes one, before the run's own history outweighs it."""

_ENDED_WELL = ("finished", "halted")


class Cadence:
    """When the next save is due.

    Args:
        every: optimizer steps, a time, or ``"auto"``.
        mtbf: mean time between failures, for ``"auto"``; by default :func:`mean_time_between` of the journal.
        to_memory: it is about saves to memory, which survive a failure of processes alone.

    Attributes:
        steps: the steps between two saves, where they are counted in steps.

    Raises:
        UnsupportedSetting: not a positive number of steps, a positive time or ``"auto"``; or ``mtbf`` without
            ``"auto"``.
    """

    def __init__(self, every: SaveEvery, mtbf: timedelta | None = None, *, to_memory: bool = False) -> None:
        counted = isinstance(every, int) and not isinstance(every, bool) and every > 0
        timed = isinstance(every, timedelta) and every > timedelta()
        if not (counted or timed or every == "auto"):
            raise UnsupportedSetting(
                f'save_every={every!r} is invalid: expected a positive number of steps, a timedelta, or "auto"'
            )
        if mtbf is not None and (every != "auto" or mtbf <= timedelta()):
            raise UnsupportedSetting(f'mtbf={mtbf} needs save_every="auto", and must be a positive time')
        self.steps = every if isinstance(every, int) else None
        self._fixed = every.total_seconds() if isinstance(every, timedelta) else None
        self._mtbf = _PRIOR if mtbf is None else mtbf.total_seconds()
        self._learns = mtbf is None
        self._to_memory = to_memory
        self._shortest = (SHORTEST_IN_MEMORY if to_memory else SHORTEST).total_seconds()
        self._saves, self._cost = 0, 0.0
        self._since = 0.0

    def start(self, now: float, history: Iterable[Mapping[str, Any]] = ()) -> None:
        """Start the clock for the first save.

        Args:
            history: the entries of the run's journal, for ``"auto"``.
        """
        self._since = now
        if self._learns:
            self._mtbf = mean_time_between(history, of_nodes=not self._to_memory)

    def saved(self, now: float, cost: float) -> None:
        """Count a save, for whatever reason it was made.

        Args:
            now: the clock, when training went on.
            cost: seconds for which the save kept the training waiting.
        """
        self._since = now
        self._saves, self._cost = self._saves + 1, self._cost + cost

    def postpone(self, now: float) -> None:
        """Wait for another interval after a save that failed. Its cost is that of the failure, and not counted."""
        self._since = now

    def is_due(self, step: int, now: float) -> bool:
        """Return whether to save after ``step``. By time, only the answer of rank zero counts."""
        if self.steps is not None:
            return step > 0 and step % self.steps == 0
        return now - self._since >= self.interval

    @property
    def interval(self) -> float:
        """Seconds between two saves; meaningless if saves are counted in steps."""
        if self._fixed is not None:
            return self._fixed
        if not self._saves:  # the first save is what measures the cost
            return self._shortest
        return min(max(optimal(self._cost / self._saves, self._mtbf), self._shortest), LONGEST.total_seconds())

    def next_save(self, step: int, now: float, rate: float | None) -> int | None:
        """Return the step of the next save; ``None`` if it is not known.

        Args:
            rate: optimizer steps a second, where it is known.
        """
        if self.steps is not None:
            return (step // self.steps + 1) * self.steps
        if not rate:
            return None
        return step + max(1, math.ceil((self._since + self.interval - now) * rate))


def chosen(every: SaveEvery | None, mtbf: timedelta | None, *, to_memory: bool = False) -> Cadence | None:
    """Return the cadence that a user's options ask for; ``None`` where the framework decides.

    Raises:
        UnsupportedSetting: as :class:`Cadence` does.
    """
    if every is None and mtbf is not None:
        raise UnsupportedSetting(f'mtbf={mtbf} needs save_every="auto"')
    return None if every is None else Cadence(every, mtbf, to_memory=to_memory)


def optimal(cost: float, mtbf: float) -> float:
    """Return the seconds between two saves that minimise the time lost to saving and to repeated work.

    Young's first-order result, with the higher-order terms of Daly (*A higher order estimate of the optimum checkpoint
    interval for restart dumps*, 2006).

    Args:
        cost: seconds a save takes from the training.
        mtbf: mean seconds between failures.
    """
    if cost >= 2 * mtbf:
        return mtbf
    share = cost / (2 * mtbf)
    return math.sqrt(2 * cost * mtbf) * (1 + math.sqrt(share) / 3 + share / 9) - cost


def mean_time_between(history: Iterable[Mapping[str, Any]], *, of_nodes: bool = False) -> float:
    """Estimate the mean time between failures, in seconds, from a run's journal.

    Each start that neither finished nor halted counts as one failure, after the time it was seen running. One failure
    in a day is added as a prior, which the run's own history outweighs as it grows.

    Args:
        history: the entries of the journal, oldest first.
        of_nodes: leave out the failures after which the next start has found checkpoints in memory: they were failures
            of processes.
    """
    seen, failures = _PRIOR, 1
    began: float | None = None
    last, ended_well = 0.0, True
    for entry in history:
        if entry["event"] == "start":
            if began is not None:
                is_counted = not ended_well and not (of_nodes and entry.get("memory"))
                seen, failures = seen + last - began, failures + is_counted
            began, ended_well = float(entry["time"]), False
        elif entry["event"] in _ENDED_WELL:
            ended_well = True
        last = float(entry["time"])
    return seen / failures
