"""How many batches an optimizer step takes: as many in a resumed epoch as before."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from resume_adapters.errors import UnsupportedSetting

_SEVERAL = 2
"""Different lengths that are kept: if there are two, nothing follows from them."""

_COUNTING: dict[Any, str] = {
    enumerate: "enumerate() counts batches from 0 again in a resumed epoch: count with run.enumerate(loader)",
    itertools.islice: (
        "islice() counts batches from 0 again in a resumed epoch: shorten the pass with run.batches(loader, limit=...)"
    ),
}
_PASSING_ON = (zip, tuple, map, itertools.chain)
_DEPTH = 4


class StepWindows:
    """The batches between two optimizer steps of an epoch.

    An accumulation that the script counts from the start of the epoch, as ``enumerate`` does, has another length where
    a resumed epoch begins in its middle.
    """

    def __init__(self) -> None:
        self._lengths: list[int] = []
        self._usual = 0
        self._count = 0
        self._is_first = True
        self._is_resumed = False

    def begin_epoch(self) -> None:
        """Begin an epoch: its first window may be shorter than the others."""
        self._is_first, self._is_resumed, self._usual = True, False, 0

    def lengths(self) -> list[int]:
        """Return the lengths that windows have had within an epoch, as :meth:`resume` takes them."""
        return [] if self._count else self._lengths

    def resume(self, lengths: Sequence[int]) -> None:
        """Resume in the middle of an epoch, between two windows."""
        self._lengths = list(lengths)
        self._is_first, self._is_resumed, self._usual = False, True, 0

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
        if has_stepped and self._count == self._usual:  # as nearly always
            self._count = 0
            return False
        return self._add_other(has_stepped=has_stepped, is_last=is_last)

    def _add_other(self, *, has_stepped: bool, is_last: bool) -> bool:
        """Count batches that end no window, or one of another length than the one before; see :meth:`add`."""
        expected = self._lengths[0] if self._is_resumed and len(self._lengths) == 1 else 1
        is_short = has_stepped and self._count < expected and not is_last
        differs = expected > 1 and (is_short or self._count > expected)
        if has_stepped:
            if not (self._is_first or is_last or self._count in self._lengths):
                self._lengths = [*self._lengths, self._count][-_SEVERAL:]
            self._usual = self._count if self._count in self._lengths else 0
            self._count, self._is_first, self._is_resumed = 0, False, False
        return differs


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


def counted_from_zero(batches: Iterator[Any]) -> str:
    """Return what to do about the builtin that a script counts batches with; nothing where it uses none."""
    return _counted(batches, _DEPTH)


def _counted(batches: Any, depth: int) -> str:
    holders = gc.get_referrers(batches) if depth else []
    for each in holders:
        if type(each) in _COUNTING:
            return _COUNTING[type(each)]
    within = [each for each in holders if isinstance(each, _PASSING_ON)]
    return next(filter(None, (_counted(each, depth - 1) for each in within)), "")
