"""The class of a watched ``DataLoader``: a subclass of its own, whose passes and whose sampler go through its watch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol


class Watch(Protocol):
    """What a watched loader asks."""

    def iterate(self, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Begin a pass; ``make`` makes the loader's own iterator."""

    def sampler(self, inner: Any) -> Any:
        """Return the index sampler that stands in for the loader's own."""


@functools.cache
def watched_class(base: Any) -> Any:
    """Return the subclass of a loader class that asks its ``resume_watch``; the same one for the same class."""

    class Watched(base):  # type: ignore[misc]  # the base is known at run time
        def __iter__(self) -> Iterator[Any]:
            watch: Watch = self.resume_watch
            return watch.iterate(super().__iter__)

        # seam: DataLoader._index_sampler (torch 2.13): `batch_sampler` and `sampler` cannot be set after construction.
        @property
        def _index_sampler(self) -> Any:
            watch: Watch = self.resume_watch
            return watch.sampler(super()._index_sampler)

    Watched.__name__, Watched.__qualname__, Watched.__module__ = base.__name__, base.__qualname__, base.__module__
    return Watched


class WatchedIterator:
    """One pass over a watched loader; what else the loader's own iterator can do, this one can.

    Args:
        fetch: returns the next batch of an iterator.
        inner: the loader's own iterator.
    """

    def __init__(self, fetch: Callable[[Iterator[Any]], Any], inner: Iterator[Any]) -> None:
        self._fetch = fetch
        self._inner = inner

    def __iter__(self) -> WatchedIterator:
        return self

    def __next__(self) -> Any:
        return self._fetch(self._inner)

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
