"""The index sampler of a watched loader, and the generators that belong to the loader and its samplers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from resume_adapters.core.state import rng

Tree = dict[str, Any]


class LoaderRandomState:
    """The random state that shapes a loader's order: the CPU's generators, and those that belong to the loader.

    Args:
        loader: a ``torch.utils.data.DataLoader``.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def capture(self) -> Tree:
        """Return the state of now."""
        return {"cpu": rng.cpu_to_tree(rng.capture_cpu()), "generators": self.generators()}

    def restore(self, moment: Tree) -> None:
        """Put back what :meth:`capture` returned."""
        rng.restore_cpu(rng.cpu_from_tree(moment["cpu"]))
        self.restore_generators(moment["generators"])

    def generators(self) -> Tree:
        """Return the state of the loader's own generators, by where each was found."""
        return {name: generator.get_state() for name, generator in _generators(self._loader).items()}

    def restore_generators(self, states: Tree) -> None:
        """Put back what :meth:`generators` returned."""
        for name, generator in _generators(self._loader).items():
            if name in states:
                generator.set_state(states[name])


class TrackedSampler:
    """The index sampler of a watched loader: notes the random state when a pass begins, and skips on resume."""

    def __init__(self, moment: LoaderRandomState, inner: Any) -> None:
        self._moment = moment
        self._inner = inner
        self._at_iter: Tree | None = None
        self._at_first: Tree | None = None
        self._resume: tuple[int, Tree | None] | None = None
        self._is_within = True
        self.after_first: Tree | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __len__(self) -> int:
        return len(self._inner)

    def moments(self) -> Tree | None:
        """Return the random state when this pass began and when its first index was asked for."""
        return None if self._at_first is None else {"iter": self._at_iter, "first": self._at_first}

    def resume_at(self, skip: int, moments: Tree | None, *, within: bool = True) -> None:
        """Begin the next pass as at ``moments`` (as things are, without) and after ``skip`` batches of indices.

        Args:
            skip: batches of indices to pass over.
            moments: what :meth:`moments` returned.
            within: the pass goes on in its middle. One that begins anew draws its order and then its first batch.
        """
        self._resume = (skip, moments)
        self._is_within = within
        self.after_first = None

    def forget(self) -> None:
        """Drop what :meth:`resume_at` asked for, where no index was taken: the pass was resumed at its very end."""
        self._resume = None

    def __iter__(self) -> Iterator[Any]:
        # Some samplers draw their order here and some at the first index; both moments are noted and put back.
        if self._resume is None or self._resume[1] is None:
            self._at_iter = self._moment.capture()
            inner = iter(self._inner)
            return _Indices(self._run(inner, None), inner)
        now = self._moment.capture()
        self._moment.restore(self._resume[1]["iter"])
        self._at_iter = self._resume[1]["iter"]
        inner = iter(self._inner)
        after_iter = self._moment.capture()
        self._moment.restore(now)
        return _Indices(self._run(inner, after_iter), inner)

    def _run(self, inner: Iterator[Any], after_iter: Tree | None) -> Iterator[Any]:
        (skip, moments), self._resume = self._resume or (0, None), None
        if moments is None:
            self._at_first = self._moment.capture()
            yield from itertools.islice(inner, skip, None)
            return
        now = rng.capture_cpu()
        self._at_first = moments["first"] or after_iter
        assert self._at_first is not None
        self._moment.restore(self._at_first)
        first = next(itertools.islice(inner, skip, None), None)
        self.after_first = self._moment.capture()
        if self._is_within:  # the sampler drew its numbers at the start of the pass; the batch draws its own here
            rng.restore_cpu(now)
        if first is not None:
            yield first
            yield from inner


class _Indices:
    """One pass over the indices; what else the sampler's own iterator can do (say its state), this one can."""

    def __init__(self, run: Iterator[Any], inner: Iterator[Any]) -> None:
        self._run = run
        self._inner = inner

    def __iter__(self) -> _Indices:
        return self

    def __next__(self) -> Any:
        return next(self._run)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


_HELD = ("sampler", "batch_sampler")
_WRAPPED = (*_HELD, "dataset._sampler")
"""Where a loader and a sampler keep another; the last is where Lightning has one that it divides among ranks."""

_DEPTH = 4
"""How many samplers within samplers are looked into; one that holds itself is not looked into for ever."""


def _generators(loader: Any) -> dict[str, Any]:
    """Return the ``torch.Generator`` objects that belong to a loader and its samplers, by where they were found."""
    found: dict[str, Any] = {}
    for place, holder in [("loader", loader), *_samplers(loader, _HELD, "", _DEPTH)]:
        generator = getattr(holder, "generator", None)
        if hasattr(generator, "get_state") and not any(generator is other for other in found.values()):
            found[place] = generator
    return found


def _samplers(holder: Any, attributes: tuple[str, ...], place: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield the samplers in a loader or a sampler, and those within them, each with where it was found."""
    for attribute in attributes if depth else ():
        inner = holder
        for name in attribute.split("."):
            inner = getattr(inner, name, None)
        if inner is not None:
            yield f"{place}{attribute}", inner
            yield from _samplers(inner, _WRAPPED, f"{place}{attribute}/", depth - 1)
