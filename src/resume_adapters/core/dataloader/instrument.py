"""What is put into a tracked loader: its subclass, its iterator, its worker init and its collate function."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from resume_adapters.core.dataloader.elastic import ElasticStream, stream_of
from resume_adapters.core.state import rng


class Tracker(Protocol):
    """What the subclass of a tracked loader calls."""

    def iterate(self, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Begin a pass; ``make`` makes the loader's own iterator."""

    def sampler(self, inner: Any) -> Any:
        """Return the index sampler to use instead of the loader's own."""


def _untracked(value: Any) -> Any:
    """Return what a tracked loader had in the place of this attribute."""
    if isinstance(value, WorkerCollate):
        return value.collate
    return value.init if isinstance(value, WorkerInit) else value


@functools.cache
def tracked_class(base: Any) -> Any:
    """Return the subclass of a loader class that calls its ``resume_tracked``; the same one for the same class."""

    class Tracked(base):  # type: ignore[misc]  # the base is known at run time
        def __iter__(self) -> Iterator[Any]:
            tracked: Tracker = self.resume_tracked
            return tracked.iterate(super().__iter__)

        # seam: DataLoader._index_sampler (torch 2.13): `batch_sampler` and `sampler` cannot be set after construction.
        @property
        def _index_sampler(self) -> Any:
            tracked: Tracker = self.resume_tracked
            return tracked.sampler(super()._index_sampler)

        def __reduce_ex__(self, protocol: Any) -> Any:
            """Return what makes a copy: a loader as it was before it was tracked."""
            made, arguments, state, *rest = super().__reduce_ex__(protocol)
            plain = {name: _untracked(value) for name, value in state.items() if name != "resume_tracked"}
            return (made, tuple(base if each is type(self) else each for each in arguments), plain, *rest)

    Tracked.__name__, Tracked.__qualname__, Tracked.__module__ = base.__name__, base.__qualname__, base.__module__
    return Tracked


class TrackedIterator:
    """One pass over a tracked loader; other attributes are those of the loader's own iterator.

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
    """In a worker, sends with each batch the worker's random state after it, and how far its stream is."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate
        self._stream: ElasticStream | None = None
        self._has_looked = False

    def __call__(self, samples: Any) -> tuple[Any, int, Any, Any]:
        from torch.utils.data import get_worker_info

        batch = self.collate(samples)
        worker = get_worker_info()
        assert worker is not None
        if not self._has_looked:  # once in each worker: the search goes through every object that the dataset wraps
            self._stream, self._has_looked = stream_of(worker.dataset), True
        progress = self._stream.reader_progress() if self._stream is not None else None
        # Always whole: the batch that carried an earlier state may have been dropped with the rest of its pass.
        return batch, worker.id, rng.pack_cpu(rng.capture_cpu()), progress


class WorkerInit:
    """In a new worker, restores the random state that its predecessor had.

    Attributes:
        states: the state of each predecessor, while workers are started that have one.
    """

    def __init__(self, init: Callable[[int], Any] | None) -> None:
        self.init = init
        self.states: dict[int, Any] = {}

    @contextlib.contextmanager
    def restoring(self, states: Mapping[int, Any]) -> Iterator[None]:
        """Restore these states in the workers that are started while the context lasts."""
        self.states = dict(states)
        try:
            yield
        finally:
            self.states = {}

    def __call__(self, worker: int) -> None:
        if self.init is not None:
            self.init(worker)
        if worker in self.states:
            rng.restore_cpu(rng.unpack_cpu(self.states[worker]))
