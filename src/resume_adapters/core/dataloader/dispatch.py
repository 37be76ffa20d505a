"""Loaders whose rank zero fetches for all ranks: how much it fetches, and how they pad their last batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from resume_adapters.core.dataloader.tracked import TrackedLoader
from resume_adapters.core.ranks import Ranks


def fetches_per_batch(ranks: Ranks, *, splits: bool) -> int:
    """Return the batches that this rank fetches for each batch that a dispatching loader yields.

    Args:
        ranks: the ranks that the loader dispatches to.
        splits: the loader splits one batch among all ranks; else rank zero fetches a batch for each rank.
    """
    if splits:
        return 1
    return ranks.world_size if ranks.rank == 0 else 0


class FirstSlice:
    """Wraps ``slice_fn`` of a dispatching loader and keeps the slice that pads the last batch.

    The first call of a pass cuts that slice from the first batch, and the loader keeps it in a local variable, so a
    resumed pass would pad with a slice of another batch.

    Args:
        dispatcher: the loader; :meth:`is_through` says what a rank that fetches nothing cannot see beneath.
        tracked: the torch loader beneath, which knows when a pass begins.
    """

    def __init__(self, dispatcher: Any, tracked: TrackedLoader) -> None:
        self._dispatcher = dispatcher
        self._native: Callable[..., Any] = dispatcher.slice_fn
        self._tracked = tracked
        self._passes = tracked.passes
        self._restored: Any = None
        self._kept: Any = None

    def is_through(self) -> bool:
        """Return whether the last batch of the pass has been handed out, to all ranks."""
        return bool(self._dispatcher.end_of_dataloader)

    @property
    def kept(self) -> Any:
        """The slice of the current pass; ``None`` where it needs none any more."""
        return None if self.is_through() else self._kept

    def restore(self, kept: Any) -> None:
        """Pad the last batch of the next pass, which resumes one, with the slice that was kept."""
        self._kept = self._restored = kept

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = self._native(*args, **kwargs)
        if self._tracked.passes == self._passes:
            return found
        self._passes = self._tracked.passes
        self._kept, self._restored = found if self._restored is None else self._restored, None
        return self._kept
