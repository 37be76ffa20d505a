"""A batch of each pass that a later launch fetches again, to see that its data are those of before.

A batch that was fetched ahead of a save shows that by itself: it is the next one after a resume. Where nothing was
fetched ahead, this one shows it: the second batch of a pass, or the second of the first worker, by the indices of its
samples. It is fetched where the others are: in this process, or in a worker before its first batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from resume_adapters.core.observed.loaders import WITH_CHANGES, require_changes
from resume_adapters.core.observed.walk import TRAINERS, is_trained
from resume_adapters.core.state import encoding, rng
from resume_adapters.core.state.records import Record, Tried
from resume_adapters.errors import NotRestored

_DEPTH = 3
"""Objects that lead from a dataset to one that it holds: it may wrap another, which wraps a third."""

_MEMBERS = 20
"""Members of a list that are looked at: of datasets that one joins, of transforms that one composes."""

_CHANGING = (*TRAINERS, "ctypes", "multiprocessing.")
"""Libraries whose objects change as the training goes on, and those of values that processes share."""

_NAMED = 5
"""Samples that an error names."""

SEED_WHAT_IS_DRAWN = (
    "Where they are drawn, give them a seed, as in random_split(..., generator=torch.Generator().manual_seed(0)); else "
    "launch with the data of before."
)
"""What to do where a launch has other numbers among its data."""

_OTHER_SETS = "; the order of a set, which is another in each process: sort it, or set PYTHONHASHSEED for all launches"


def require_before(before: Any) -> None:
    """Try a random state before a fetch, as :attr:`CheckBatch.before`; what it raises says what is wrong."""
    if isinstance(before, Mapping):
        state, changed = rng.cpu_from_tree(before["cpu"]), before.get("content", [])
        dict(before["registered"])
    else:
        packed, changed = before if len(before) == WITH_CHANGES else (before, [])
        state = rng.unpack_cpu(packed)
    rng.require_cpu(state)
    require_changes(changed)


@dataclass(kw_only=True)
class CheckBatch(Record):
    """A batch that was fetched, and what it followed from.

    Attributes:
        indices: those of its samples; one number where the loader makes no batches.
        before: the random state before the fetch and what had changed on the dataset, as in
            :attr:`LoaderPosition.rng_before`, or, with workers, as in :attr:`LoaderPosition.pool`.
        digest: of the batch.
    """

    indices: list[int] | int
    before: Annotated[Any, Tried(require_before)]
    digest: str

    def fetched_from(self, dataset: Any, collate: Any, *, makes_batches: bool) -> Any:
        """Return the batch as it is now, fetched in the way of a loader's iterator.

        Args:
            makes_batches: an index of the loader stands for several samples.
        """
        from torch.utils.data._utils.fetch import _MapDatasetFetcher  # seam: torch 2.13

        fetcher = _MapDatasetFetcher(dataset, makes_batches, collate, False)
        return fetcher.fetch(self.indices)  # type: ignore[no-untyped-call]

    def require_same(self, batch: Any, why: str) -> None:
        """Raise if a batch is another one.

        Args:
            why: why it may be.

        Raises:
            NotRestored: it is.
        """
        if encoding.digest_of(batch) == self.digest:
            return
        named = [self.indices] if isinstance(self.indices, int) else self.indices
        raise NotRestored(
            f"the samples {', '.join(map(str, named[:_NAMED]))} of the training data are not what they were when the "
            f"checkpoint was saved: {why}"
        )


class BatchCheck:
    """Keeps the batch of a pass that a later launch is to fetch again.

    Args:
        loader: a ``torch.utils.data.DataLoader``.

    Attributes:
        kept: the batch of the running pass, or of the last one; ``None`` where there is none.
        waits: a batch of the running pass is still to be kept.
        number: its number among those that this launch fetches in the pass: the second one of the process that
            fetches it, since a sampler may draw numbers of its own with the first.
    """

    def __init__(self, loader: Any) -> None:
        from torch.utils.data import IterableDataset

        self.kept: CheckBatch | None = None
        self.waits = False
        self.number = max(1, loader.num_workers)
        self._indices: list[int] | int | None = None
        self._before: Any = None
        self._is_possible = not isinstance(loader.dataset, IterableDataset) and not _follows_more(loader)

    def begin_pass(self) -> None:
        """Drop the batch of the last pass: what a script does between them is not known."""
        self.kept = self._indices = self._before = None
        self.waits = self._is_possible

    def note(self, indices: Any, before: Callable[[], Any]) -> None:
        """Note the indices of the batch to be kept, before it is fetched.

        Args:
            before: returns what it follows from besides; ``None`` where that is known only when it has been fetched.
        """
        self._indices = _numbers(indices) if self.waits else None
        if self._indices is not None:
            self._before = before()

    def add(self, batch: Any, before: Any = None) -> None:
        """Keep the batch, if its indices were noted. It is called before the training gets the batch.

        Args:
            before: what it follows from besides, where that was not noted.
        """
        self.waits = False
        digest = None if self._indices is None else encoding.digest_of(batch)
        before = self._before if before is None else before
        if self._indices is not None and digest is not None and before is not None:
            self.kept = CheckBatch(indices=self._indices, before=before, digest=digest)


def word_hash() -> int:
    """Return the hash of a word: each process has another one, where the environment does not say which."""
    return hash("resume-adapters")


def why_others(seeds: str, rows: list[str], former_hash: int | None) -> str:
    """Return in words why the data may be others than when a position was saved.

    Args:
        seeds: which seeds were different then, in words; empty where none is known to be.
        rows: the rows of numbers that are others, by their path.
        former_hash: what :func:`word_hash` returned then; ``None`` where that is not known.
    """
    if seeds:
        return (
            f"the data follow from a seed, and it was saved with {seeds}. Launch with the former seed, or start "
            "another run directory"
        )
    if rows:
        return f"{' and '.join(rows)} has other numbers than then. {SEED_WHAT_IS_DRAWN}"
    of_sets = "" if former_hash in (None, word_hash()) else _OTHER_SETS
    return (
        "the data were changed, or were drawn without a seed, or they depend on state that is not captured (a "
        "generator of its own: register it as a part; a stream that counts its passes: give it "
        f"set_epoch{of_sets})"
    )


def makes_batches(loader: Any) -> bool:
    """Return whether an index of a loader stands for several samples, which it makes a batch of."""
    return bool(loader._auto_collation)  # seam: torch 2.13


def _numbers(indices: Any) -> list[int] | int | None:
    """Return indices as numbers of Python, ``None`` where they are something else."""
    if isinstance(indices, int | np.integer):
        return int(indices)
    if isinstance(indices, list) and all(isinstance(each, int | np.integer) for each in indices):
        return [int(each) for each in indices]
    return None


def _follows_more(loader: Any) -> bool:
    """Return whether a dataset or collate function holds a model, a sampler, a framework's trainer or a shared value.

    Its batches may then follow from how far the training is, too.
    """
    from torch.utils.data import Sampler

    def follows(thing: Any) -> bool:
        return isinstance(thing, Sampler) or is_trained(thing) or type(thing).__module__.startswith(_CHANGING)

    return any(map(follows, [*_held(loader.dataset, _DEPTH), *_held(loader.collate_fn, 1)]))


def _held(thing: Any, depth: int) -> Iterator[Any]:
    """Yield the objects that an object holds as attributes, or in a list that is one, and those that these hold."""
    for value in getattr(thing, "__dict__", {}).values() if depth else ():
        for each in value[:_MEMBERS] if isinstance(value, list | tuple) else (value,):
            yield each
            yield from _held(each, depth - 1)
