"""All ranks learn of a stop at the same step.

The flags of all ranks are joined by an asynchronous all-reduce that is started at one step boundary and read at the
next, so every rank learns of a stop at the same step and nobody waits for the network. Rank zero's word that a save is
due travels with it.
"""

from __future__ import annotations

import time
from typing import Any

from resume_adapters.core.ranks import Ranks
from resume_adapters.core.stop.signals import _ELSEWHERE, _NOTHING, StopFlag

_RHYTHM = 0.05
"""Seconds between two votes, where steps are shorter: a vote takes a few hundred microseconds of the training."""

_LONGEST_STRIDE = 8
"""Steps may become longer at any time; how late a stop is heard must not depend on how short they were."""


def common_reason(ranks: Ranks, flag: StopFlag) -> str:
    """Return why the ranks stop: the reason of the first that was asked itself. Every rank must ask."""
    reasons = ranks.gather((flag.level, flag.reason))
    own = [reason for level, reason in reasons if reason != _ELSEWHERE and level == flag.level]
    return own[0] if own and own[0] else "a stop was requested"


class StopVote:
    """Joins the flags of all ranks, one step behind.

    Where steps are short the ranks vote only after several of them, and agree in each vote on how many that are.

    Args:
        ranks: the ranks of the run.
        flag: this rank's flag.
    """

    def __init__(self, ranks: Ranks, flag: StopFlag) -> None:
        self.flag = flag
        self._ranks = ranks.twin()
        self._group = getattr(self._ranks, "group", None)
        self._level = _NOTHING
        self._save = False
        self._due = False
        self._votes: Any = None
        self._work: Any = None
        self._place = ""
        self._asked, self._stride, self._voted = 0, 1, 0.0

    @property
    def is_behind(self) -> bool:
        """Whether what one asks for is heard at the next asking only."""
        return self._group is not None

    def reached(self, place: str = "step", *, save: bool = False) -> bool:
        """Return whether all ranks are to stop now. Every rank must ask at the same places.

        Args:
            place: in what kind of loop it is asked; one is quicker than another.
            save: this rank says that a save is due.
        """
        if self._group is None:
            self._save = self._save or save
            return self.flag.reason is not None
        self._collect()
        if place != self._place:
            self._place, self._asked, self._stride, self._voted = place, 0, 1, 0.0
        self._asked += 1
        self._due = self._due or save
        if not self._level and self._asked >= self._stride:
            self._vote()
        return bool(self._level)

    def take_save(self) -> bool:
        """Return whether a rank has said that a save is due, once: all ranks are told at the same place."""
        save, self._save = self._save, False
        return save

    def settle(self) -> bool:
        """Return whether any rank is to stop, and wait for all of them to say so. Every rank must ask."""
        self._collect()
        self._heed(max(self._ranks.gather(self.flag.level)))
        return self.flag.reason is not None

    def close(self) -> None:
        """Take in the vote that is under way, so that no rank leaves while another waits for it."""
        self._collect()

    def _vote(self) -> None:
        import torch
        import torch.distributed as dist

        now = time.monotonic()
        stride = int(min(_RHYTHM * self._asked / max(now - self._voted, 1e-9), _LONGEST_STRIDE))
        self._votes = torch.tensor([self.flag.level, self._due, stride], dtype=torch.int32)
        self._asked, self._voted, self._due = 0, now, False
        self._work = dist.all_reduce(self._votes, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

    def _collect(self) -> None:
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        level, save, stride = self._votes.tolist()
        self._stride = max(1, stride)
        self._save = self._save or bool(save)
        self._heed(level)

    def _heed(self, level: int) -> None:
        self._level = max(self._level, level)
        self.flag.heed(self._level)
