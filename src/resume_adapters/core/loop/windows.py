"""How many batches a step takes: as many in a resumed epoch as before, and how many are taken ahead of their step."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Sequence
from types import GeneratorType
from typing import Any

from resume_adapters.errors import UnsupportedSetting

_SEVERAL = 2
"""Different lengths that are kept: if there are two, nothing follows from them."""

_COUNTING: dict[Any, str] = {
    enumerate: "enumerate() starts at 0 in resumed epochs: use run.enumerate(loader), or start at run.resume().batches",
    itertools.islice: "islice() counts batches from 0 again in a resumed epoch: use run.batches(loader, limit=...)",
}
_COUNTERS = {itertools.count, type(iter(range(0)))}
BESIDE = "range() and count() start at 0 in resumed epochs: use run.enumerate(loader), or run.resume().batches"
_PASSING_ON = (zip, tuple, map, itertools.chain, GeneratorType)
_DEPTH = 4

_SURE = 4
"""Steps of a pass after which is known whether the script takes batches ahead of their step."""


class StepWindows:
    """The batches between two optimizer steps of an epoch.

    An accumulation that the script counts from the start of the epoch, as ``enumerate`` does, has another length where
    a resumed epoch begins in its middle.
    """

    def __init__(self) -> None:
        self._lengths: list[int] = []
        self._count = 0
        self._is_first = True
        self._is_resumed = False

    def begin_epoch(self) -> None:
        """Begin an epoch: its first window may be shorter than the others."""
        self._is_first, self._is_resumed = True, False

    def lengths(self) -> list[int]:
        """Return the lengths that windows have had within an epoch, as :meth:`resume` takes them."""
        return [] if self._count else self._lengths

    def resume(self, lengths: Sequence[int]) -> None:
        """Resume in the middle of an epoch, between two windows."""
        self._lengths = list(lengths)
        self._is_first, self._is_resumed = False, True

    def add(self, batches: int, has_stepped: bool, is_last: bool) -> bool:
        """Count batches.

        Args:
            batches: how many.
            has_stepped: an optimizer step has ended with them.
            is_last: they are, or may be, the last of their pass, with which a window ends early.

        Returns:
            Whether this is the first window after a resume, and has another length than all before.
        """
        self._count += batches
        expected = self._lengths[0] if self._is_resumed and len(self._lengths) == 1 else 1
        is_short = has_stepped and self._count < expected and not is_last
        differs = expected > 1 and (is_short or self._count > expected)
        if has_stepped:
            if not (self._is_first or is_last or self._count in self._lengths):
                self._lengths = [*self._lengths, self._count][-_SEVERAL:]
            self._count, self._is_first, self._is_resumed = 0, False, False
        return differs


class TakenAhead:
    """The batches that a script has taken, and not used yet.

    A prefetcher takes more of them for the first step of a pass than for each of the others; a script that takes all
    that it needs at once takes none for the steps that follow.

    Args:
        habit: what :attr:`habit` was when the run was saved; ``None`` where it is to be found out.

    Attributes:
        left: batches that are taken, and not used.
        is_sure: it is known whether there are any.
    """

    def __init__(self, habit: Sequence[int] | None = None) -> None:
        self.left = 0
        self.is_sure = True
        self._usual, self._depth = habit or (0, 0)
        self._takes: list[int] | None = [] if habit is None else None

    @property
    def habit(self) -> list[int] | None:
        """What a step uses and what is taken ahead, in batches: zeros where nothing is; ``None``: not known."""
        return [self._usual, self._depth] if self._takes is None else None

    @property
    def must_wait(self) -> bool:
        """Whether nothing can be saved now: the batches that are taken would be lost, or may be."""
        return not self.is_sure or (self.left > 0 and self._depth == 0)

    @property
    def is_prefetching(self) -> bool:
        """Whether the script takes batches ahead of their step throughout."""
        return self._depth > 0

    def begin_pass(self) -> None:
        """Begin a pass, with nothing taken ahead of it."""
        self.left, self.is_sure = 0, True
        if self._takes is not None:
            self._takes = []

    def add(self, taken: int, *, is_last: bool) -> int:
        """Count the batches that were taken for a step; return how many it has used.

        Args:
            is_last: the pass has no more.
        """
        if self._takes is not None:
            return self._find_out([*self._takes, taken], is_last=is_last)
        if not self._usual:
            return taken
        self.left += taken
        used = min(self._usual, self.left)
        self.left -= used
        if self._depth and self.left > self._depth:  # it takes as many as it likes
            used, self.left, self._usual, self._depth = used + self.left, 0, 0, 0
        return used

    def _find_out(self, takes: list[int], *, is_last: bool) -> int:
        first, *others = self._takes = takes
        is_even = all(each == others[0] for each in others[: -1 if is_last else None])
        if others and (first <= max(others[0], 1) or not is_even):
            self._takes, self.is_sure = None, True
        elif others and (is_last or len(takes) >= _SURE):
            self._takes, self.is_sure = None, True
            self._usual = max(others[0], 1)
            self.left = max(sum(takes) - len(takes) * self._usual, 0)
            self._depth = first - self._usual if others[0] else 0
        else:
            self.is_sure = first <= 1
        return takes[-1]


def other_window() -> UnsupportedSetting:
    """Return the error that the first window after a resume has another length than those before."""
    return UnsupportedSetting(
        "the first optimizer step after the resume takes more or fewer batches than those before: the script counts "
        "the batches of an epoch from 0, as enumerate() does, and the resumed epoch begins in its middle. Count with:\n"
        "    for index, batch in run.enumerate(loader):\n"
    )


def other_length(before: int) -> UnsupportedSetting:
    """Return the error that a resumed pass continues past the batch at which all earlier ones ended."""
    return UnsupportedSetting(
        f"a resumed pass over a loader continues past {before} batches, where the script ended every earlier pass: the "
        "script counts the batches from 0, and the resumed pass begins in its middle. Let the run count:\n\n"
        "    for batch in run.batches(loader, limit=...):\n\nor\n\n"
        "    for index, batch in run.enumerate(loader):\n"
    )


def counted_from_zero(batches: Any, depth: int = _DEPTH) -> str:
    """Return what to do about the builtin that a script counts batches with; nothing where it uses none.

    Call it while the script has a batch: who else hands batches on runs otherwise, and what runs refers to nothing.
    """
    holders = gc.get_referrers(batches) if depth else []
    found = [_COUNTING[type(each)] for each in holders if type(each) in _COUNTING]
    found += [BESIDE for each in holders if type(each) is tuple and _COUNTERS & {*map(type, each)}]  # of ``zip``
    found = found or [counted_from_zero(each, depth - 1) for each in holders if isinstance(each, _PASSING_ON)]
    return next(filter(None, found), "")
