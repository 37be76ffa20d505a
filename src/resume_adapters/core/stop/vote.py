"""All ranks learn of a stop at the same step.

An asynchronous all-reduce combines the flags of all ranks. It is started at one step boundary and read at the next, so
all ranks learn of a stop at the same step, and none waits for the network. The same vote carries rank zero's decision
that a save is due.
"""

from __future__ import annotations

import time
from enum import IntEnum
from typing import Any

from resume_adapters.core.ranks import Ranks
from resume_adapters.core.stop.signals import ANOTHER_RANK, StopFlag, StopLevel

_PERIOD = 0.05
"""Least seconds between two votes: a vote costs the training a few hundred microseconds."""

_MAX_STRIDE = 8
"""Most steps between two votes: steps may become longer at any time, and a stop must not be delayed by that."""


def common_reason(ranks: Ranks, flag: StopFlag) -> str:
    """Return why the ranks stop: the reason of the first rank that has its own. Every rank calls it.

    All ranks return the same: a flag that is set after its rank has answered does not count.
    """
    reasons = ranks.gather((flag.level, flag.reason))
    highest = max(level for level, _ in reasons)
    asked = [reason for level, reason in reasons if reason != ANOTHER_RANK and level == highest]
    return asked[0] if asked and asked[0] else "a stop was requested"


class SaveWish(IntEnum):
    """What is to be saved; the greatest wish of all ranks counts."""

    NOTHING = 0
    TO_MEMORY = 1
    TO_DISK = 2


class StopVote:
    """Combines the stop flags of all ranks, one step behind.

    Where steps are short, the ranks vote only every few steps; each vote also agrees on that number.

    Args:
        ranks: the ranks of the run.
        flag: this rank's flag.
    """

    def __init__(self, ranks: Ranks, flag: StopFlag) -> None:
        self.flag = flag
        self._ranks = ranks.new_channel()
        self._group = getattr(self._ranks, "group", None)
        self._level = StopLevel.GO_ON
        self._save = SaveWish.NOTHING
        self._votes_save = SaveWish.NOTHING
        self._votes: Any = None
        self._work: Any = None
        self._place = ""
        self._polled, self._stride, self._voted = 0, 1, 0.0

    @property
    def is_behind(self) -> bool:
        """Whether a request takes effect only at the next poll."""
        return self._group is not None

    def poll(self, place: str = "step", *, save: SaveWish = SaveWish.NOTHING) -> bool:
        """Return whether all ranks stop now. Every rank calls it at the same places.

        Args:
            place: the kind of loop that calls; the iterations of one are shorter than those of another.
            save: what is due on this rank.
        """
        if self._group is None:
            self._save = max(self._save, save)
            return self.flag.reason is not None
        self._collect()
        if place != self._place:
            self._place, self._polled, self._stride, self._voted = place, 0, 1, 0.0
        self._polled += 1
        self._votes_save = max(self._votes_save, save)
        if not self._level and self._polled >= self._stride:
            self._vote()
        return bool(self._level)

    def take_save(self) -> SaveWish:
        """Return what the ranks voted to save, and reset that: all ranks learn of it at the same place."""
        save, self._save = self._save, SaveWish.NOTHING
        return save

    def agree_now(self) -> bool:
        """Return whether any rank stops, waiting for all of them to answer. Every rank calls it.

        All ranks return the same: a flag that is set after its rank has answered counts at the next vote.
        """
        self._collect()
        self._apply(max(self._ranks.gather(int(self.flag.level))))
        return bool(self._level)

    def close(self) -> None:
        """Wait for the vote in flight, so that no rank leaves while another waits for it; then close the channel."""
        self._collect()
        self._group = None
        self._ranks.close()

    def _vote(self) -> None:
        import torch
        import torch.distributed as dist

        now = time.monotonic()
        stride = int(min(_PERIOD * self._polled / max(now - self._voted, 1e-9), _MAX_STRIDE))
        self._votes = torch.tensor([self.flag.level, self._votes_save, stride], dtype=torch.int32)
        self._polled, self._voted, self._votes_save = 0, now, SaveWish.NOTHING
        self._work = dist.all_reduce(self._votes, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

    def _collect(self) -> None:
        if self._work is None:
            return
        work, self._work = self._work, None
        work.wait()
        level, save, stride = self._votes.tolist()
        self._stride = max(1, stride)
        self._save = max(self._save, SaveWish(save))
        self._apply(level)

    def _apply(self, level: int) -> None:
        self._level = StopLevel(max(self._level, level))
        self.flag.apply(self._level)
