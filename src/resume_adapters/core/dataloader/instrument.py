"""What a tracked loader is made of: its subclass, its iterator, and what its workers run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from resume_adapters.core.dataloader.elastic import ElasticStream, stream_of
from resume_adapters.core.state import rng


class Tracker(Protocol):
    """What a watched loader asks."""

    def iterate(self, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Begin a pass; ``make`` makes the loader's own iterator."""

    def sampler(self, inner: Any) -> Any:
        """Return the index sampler that stands in for the loader's own."""


@functools.cache
def tracked_class(base: Any) -> Any:
    """Return the subclass of a loader class that asks its ``resume_watch``; the same one for the same class."""

    class Watched(base):  # type: ignore[misc]  # the base is known at run time
        def __iter__(self) -> Iterator[Any]:
            watch: Tracker = self.resume_watch
            return watch.iterate(super().__iter__)

        # seam: DataLoader._index_sampler (torch 2.13): `batch_sampler` and `sampler` cannot be set after construction.
        @property
        def _index_sampler(self) -> Any:
            watch: Tracker = self.resume_watch
            return watch.sampler(super()._index_sampler)

    Watched.__name__, Watched.__qualname__, Watched.__module__ = base.__name__, base.__qualname__, base.__module__
    return Watched


class TrackedIterator:
    """One pass over a watched loader; what else the loader's own iterator can do, this one can.

    Args:
        fetch: returns the next batch of an iterator.
        inner: the loader's own iterator.
    """

    def __init__(self, fetch: Callable[[Iterator[Any]], Any], inner: Iterator[Any]) -> None:
        self._fetch = fetch
        self._inner = inner

    def __iter__(self) -> TrackedIterator:
        return self

    def __next__(self) -> Any:
        return self._fetch(self._inner)

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def are_kept(loader: Any) -> bool:
    """Return whether a loader's workers outlive its passes and are running."""
    return getattr(loader, "_iterator", None) is not None  # seam: torch 2.13, DataLoader


class WorkerCollate:
    """In a worker, sends each batch together with the worker's random state after it, and how far its stream is."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate
        self._stream: ElasticStream | None = None
        self._has_looked = False

    def __call__(self, samples: Any) -> tuple[Any, int, Any, Any]:
        from torch.utils.data import get_worker_info

        batch = self.collate(samples)
        worker = get_worker_info()
        assert worker is not None
        # Always whole: the batch that carried an earlier state may have been thrown away with the rest of its pass.
        if not self._has_looked:  # once in each worker: it is asked of every object that the dataset wraps
            self._stream, self._has_looked = stream_of(worker.dataset), True
        reached = self._stream.reached() if self._stream is not None else None
        return batch, worker.id, rng.to_bytes(rng.capture_cpu()), reached


class WorkerInit:
    """In a new worker, puts back the random state that its predecessor had."""

    def __init__(self, init: Callable[[int], Any] | None) -> None:
        self.init = init
        self.states: dict[int, Any] = {}

    def __call__(self, worker: int) -> None:
        if self.init is not None:
            self.init(worker)
        if worker in self.states:
            rng.restore_cpu(rng.from_bytes(self.states[worker]))
