"""Loaders whose rank zero fetches for all: how much, and what they fill their last batch up with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from resume_adapters.core.dataloader.tracked import TrackedLoader
from resume_adapters.core.ranks import Ranks


def fetches_per_batch(ranks: Ranks, *, splits: bool) -> int:
    """Return the batches that this rank fetches for each batch that a dispatching loader gives to the training loop.

    Args:
        ranks: the ranks that the loader dispatches to.
        splits: the loader cuts one batch for all; else rank zero fetches a batch for every rank, and the others none.
    """
    if splits:
        return 1
    return ranks.world_size if ranks.rank == 0 else 0


class FirstSlice:
    """Stands before a dispatching loader's slicing function, whose first call of a pass cuts what fills up the last.

    The loader keeps that slice of its first batch in a local variable, so a resumed pass would fill up with another.

    Args:
        native: the loader's own slicing function.
        watch: the watch of the loader beneath; it knows when a pass begins.

    Attributes:
        kept: the slice of the running pass.
    """

    def __init__(self, native: Callable[..., Any], watch: TrackedLoader) -> None:
        self._native = native
        self._watch = watch
        self._passes = watch.passes
        self._restored: Any = None
        self.kept: Any = None

    def restore(self, kept: Any) -> None:
        """Let the next pass, which is the rest of one, fill up with the slice that was kept."""
        self.kept = self._restored = kept

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = self._native(*args, **kwargs)
        if self._watch.passes == self._passes:
            return found
        self._passes = self._watch.passes
        self.kept, self._restored = found if self._restored is None else self._restored, None
        return self.kept
