"""What is put into a tracked loader: its subclass and its iterator."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from resume_adapters.core.dataloader.worker_rng import WorkerCollate, WorkerInit


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


@contextlib.contextmanager
def watched(loader: Any, taken: Callable[[Any, int], object]) -> Iterator[None]:
    """Call a function with each batch that a script takes from a loader, and its number in the pass, meanwhile.

    Args:
        loader: a loader, or what a framework put around one.
        taken: the function.
    """
    kind: Any = type(loader)

    def batches(self: Any) -> Iterator[Any]:
        numbers = itertools.count()

        def fetch(inner: Iterator[Any]) -> Any:
            batch = next(inner)
            taken(batch, next(numbers))
            return batch

        return TrackedIterator(fetch, kind.__iter__(self))

    watching = type(kind.__name__, (kind,), {"__iter__": batches, "__module__": kind.__module__})
    _set_class(loader, watching)
    try:
        yield
    finally:
        _set_class(loader, kind)


_set_class = vars(object)["__class__"].__set__
"""Sets a class also where a loader shows that of the one within, as Accelerate's do."""
