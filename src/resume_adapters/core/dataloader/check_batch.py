"""A batch of each pass that a later launch fetches again, to see that its data are those of before.

A batch that was fetched ahead of a save shows that by itself: it is the next one after a resume. Where nothing was
fetched ahead, this one shows it: the second batch of the pass, by its indices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from resume_adapters.core.state import encoding
from resume_adapters.core.state.records import Record

_DEPTH = 3
"""Objects that lead from a dataset to one that it holds: it may wrap another, which wraps a third."""

_MEMBERS = 20
"""Members of a list that are looked at: of datasets that one joins, of transforms that one composes."""

_OF_TRAINING = ("accelerate.", "deepspeed.", "lightning.", "pytorch_lightning.", "transformers.trainer")
"""Libraries whose objects change as the training goes on, and what follows from them."""


@dataclass(kw_only=True)
class CheckBatch(Record):
    """A batch that was fetched, and what it followed from.

    Attributes:
        indices: those of its samples; one number where the loader makes no batches.
        before: the random state before the fetch, and what had changed on the dataset, as in
            :attr:`LoaderPosition.rng_before`.
        digest: of the batch.
    """

    indices: list[int] | int
    before: dict[str, Any]
    digest: str


class BatchCheck:
    """Keeps the batch of a pass that a later launch is to fetch again.

    Args:
        loader: a ``torch.utils.data.DataLoader``.
        before: returns the random state, and what has changed on the dataset, as a tree.

    Attributes:
        kept: the batch of the running pass, or of the last one; ``None`` where there is none.
        waits: a batch of the running pass is still to be kept.
    """

    def __init__(self, loader: Any, before: Callable[[], dict[str, Any]]) -> None:
        from torch.utils.data import IterableDataset

        self.kept: CheckBatch | None = None
        self.waits = False
        self._loader = loader
        self._before = before
        self._noted: tuple[list[int] | int, dict[str, Any]] | None = None
        # Workers have each a dataset of their own, and what theirs opens may not be opened in this process before.
        is_possible = not (loader.num_workers or isinstance(loader.dataset, IterableDataset))
        self._is_possible = is_possible and not _follows_more(loader)

    def begin_pass(self) -> None:
        """Drop the batch of the last pass: what a script does between them is not known."""
        self.kept = self._noted = None
        self.waits = self._is_possible

    def note(self, indices: Any) -> None:
        """Note the indices of the batch that is fetched next."""
        numbers = _numbers(indices) if self.waits else None
        if numbers is not None:
            self._noted = (numbers, self._before())

    def add(self, batch: Any) -> None:
        """Keep a batch that was fetched, if its indices were noted. It is called before the training gets the batch."""
        if self._noted is None:
            return
        (indices, before), self._noted, self.waits = self._noted, None, False
        digest = encoding.digest_of(batch)
        if digest is not None:
            self.kept = CheckBatch(indices=indices, before=before, digest=digest)

    def fetch(self, kept: CheckBatch) -> Any:
        """Fetch a batch again, in the way of the loader's own iterator."""
        from torch.utils.data.dataloader import _DatasetKind  # seam: torch 2.13

        loader = self._loader
        fetcher = _DatasetKind.create_fetcher(  # type: ignore[no-untyped-call]
            loader._dataset_kind, loader.dataset, loader._auto_collation, loader.collate_fn, loader.drop_last
        )
        return fetcher.fetch(kept.indices)


def _numbers(indices: Any) -> list[int] | int | None:
    """Return indices as numbers of Python, ``None`` where they are something else."""
    if isinstance(indices, int | np.integer):
        return int(indices)
    if isinstance(indices, list) and all(isinstance(each, int | np.integer) for each in indices):
        return [int(each) for each in indices]
    return None


def _follows_more(loader: Any) -> bool:
    """Return whether a loader's dataset or collate function holds a model, a sampler or a framework's trainer.

    Its batches may then follow from how far the training is, too.
    """
    import torch
    from torch.utils.data import Sampler

    held = [*_held(loader.dataset, _DEPTH), *_held(loader.collate_fn, 1)]
    others = (torch.nn.Module, Sampler)
    return any(isinstance(each, others) or type(each).__module__.startswith(_OF_TRAINING) for each in held)


def _held(thing: Any, depth: int) -> Iterator[Any]:
    """Yield the objects that an object holds as attributes, or in a list that is one, and those that these hold."""
    for value in getattr(thing, "__dict__", {}).values() if depth else ():
        for each in value[:_MEMBERS] if isinstance(value, list | tuple) else (value,):
            yield each
            yield from _held(each, depth - 1)
