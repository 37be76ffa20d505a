"""What an evaluation changes on its data as it reads them, and the random state of workers that outlive it.

That is the generator of a dataset or of a sampler, or a counter. A checkpoint is never saved in the middle of an
evaluation, so what is there between two steps is what the next one begins with.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from resume_adapters.core.dataloader.progress import LoaderPosition
from resume_adapters.core.dataloader.sampler import length_of
from resume_adapters.core.dataloader.tracked import TrackedLoader, track
from resume_adapters.core.log import logger
from resume_adapters.core.observed.code import generators_of
from resume_adapters.core.observed.loaders import LoaderAttributes, are_kept, begins_itself, content_of
from resume_adapters.core.state import rng
from resume_adapters.core.state.records import FRESH, Record


class EvaluatedData:
    """The data of the loaders that evaluations read, by the name of the loader."""

    def __init__(self) -> None:
        self._read: dict[str, Any] = {}
        self._attributes: dict[str, LoaderAttributes] = {}
        self._saved: dict[str, list[Any]] = {}

    @property
    def missing(self) -> dict[str, str]:
        """What has changed and is not captured: paths, with the names of the types."""
        return {path: kind for each in self._attributes.values() for path, kind in each.missing.items()}

    def watch(self, name: str, read: Any, parts: Callable[[], Mapping[str, Any]], trained: Sequence[Any]) -> None:
        """Restore the data of a loader, if that is still to be done, and compare them from now on.

        Call it before the loader is read.

        Args:
            read: what is read; as long as it is the same object, it stays watched as it is.
            parts: returns what it is read with, by name; the code of a dataset may take a while to go through.
            trained: what the training reads with, too, which is captured there.
        """
        if self._read.get(name) is not read:
            shared = {id(each) for each in trained}
            found = {key: each for key, each in parts().items() if each is not None and id(each) not in shared}
            roots = {f"{name}.{key}": each for key, each in found.items()}
            without = [*trained, *generators_of(trained).values()]
            self._read[name], self._attributes[name] = read, LoaderAttributes(roots, without=without)
        if name in self._saved:
            self._attributes[name].restore(self._saved.pop(name))

    def forget(self, name: str) -> None:
        """Leave a loader to others: the training reads it."""
        for held in (self._read, self._attributes, self._saved):
            held.pop(name, None)

    def look(self) -> None:
        """Find what evaluations have changed. Call it after each, or before a save."""
        for each in self._attributes.values():
            each.look()

    def capture(self) -> dict[str, list[Any]]:
        """Return what is known to change, of each loader."""
        return {**self._saved, **{name: each.capture() for name, each in self._attributes.items()}}

    def restore(self, saved: Mapping[str, list[Any]]) -> None:
        """Restore what :meth:`capture` returned, of each loader when it is watched."""
        self._saved = {name: state for name, state in saved.items() if state}


@dataclass
class EvaluationLoader(Record):
    """An evaluation loader whose persistent workers were running.

    Attributes:
        name: under which the adapter knows it.
        position: between two passes, or where its last pass was left, with the random state of its workers.
    """

    name: str
    position: Annotated[LoaderPosition, FRESH]


class EvaluationWorkers:
    """The workers of evaluation loaders that outlive a pass, by the name of the loader.

    They send their state only where their loader was tracked before they were started.
    """

    def __init__(self) -> None:
        self._tracked: dict[str, TrackedLoader] = {}
        self._to_restore: dict[str, LoaderPosition | None] = {}

    def watch(self, name: str, loader: Any) -> None:
        """Track a loader, and restore its workers if they were running. Call it before the loader is read."""
        if not _outlives_a_pass(loader):
            self._to_restore.pop(name, None)
        elif not are_kept(loader) or hasattr(loader, "resume_tracked") or hasattr(loader, "resume_made"):
            self._tracked[name] = track(loader)
            if name in self._to_restore:
                self._restore(name, self._to_restore.pop(name))

    def forget(self, name: str) -> None:
        """Leave a loader to others: the training reads it."""
        self._tracked.pop(name, None)
        self._to_restore.pop(name, None)

    def restore(self, names: Iterable[str], loaders: Iterable[EvaluationLoader] | None) -> None:
        """Restore persistent workers, of each loader when it is watched.

        Args:
            names: the names of all loaders whose workers were running.
            loaders: those of which the state was saved; ``None`` where the version that saved it kept none.
        """
        self._to_restore = dict.fromkeys(names) | {each.name: each.position for each in loaders or ()}

    def _restore(self, name: str, position: LoaderPosition | None) -> None:
        tracked, before = self._tracked[name], rng.capture_cpu()
        if position is None:  # an earlier version saved no more than that they were running
            iter(tracked.loader)
        elif tracked.differences(position) or position.length != length_of(tracked.loader.dataset):
            logger.warning(
                "The evaluation loader %r had a different dataset, batch size or number of workers when the checkpoint "
                "was saved: the random state of its workers starts over.",
                name,
            )
        elif not position.ended:  # the workers had fetched more of that pass, which was left
            tracked.restore(position)
            iter(tracked.loader)
        else:
            tracked.restore(position)
            tracked.restore_now(process=False, content=False)  # ``EvaluatedData`` restores that
        rng.restore_cpu(before)

    def capture(self) -> list[EvaluationLoader]:
        """Return the loaders whose workers a resume must restore, as far as their state is known."""
        waiting = {name: position for name, position in self._to_restore.items() if position is not None}
        running = {name: _position(each) for name, each in self._tracked.items() if each.has_running_workers}
        return [EvaluationLoader(name, position) for name, position in {**waiting, **running}.items()]

    @property
    def unknown(self) -> list[str]:
        """The names of loaders that are still to be watched, and of which no more is known."""
        return [name for name, position in self._to_restore.items() if position is None]

    def close(self) -> None:
        """Detach the loaders from the run. They stay tracked: their workers may be running."""
        while self._tracked:
            self._tracked.popitem()[1].release()


class EvaluationLoaders:
    """The loaders of evaluations, by the names that an adapter gives them.

    Attributes:
        data: what changes on their data, samplers and generators.
        workers: those of their workers that outlive a pass.
    """

    def __init__(self) -> None:
        self.data, self.workers = EvaluatedData(), EvaluationWorkers()

    def watch(self, name: str, loader: Any, trained: Sequence[Any] = ()) -> None:
        """Watch a loader, and restore what is to be of it. Call it before the loader is read.

        Args:
            trained: what the training reads with, too, which is captured there.
        """
        self.data.watch(name, loader, functools.partial(_parts, loader), trained)
        self.workers.watch(name, loader)

    def forget(self, name: str) -> None:
        """Leave a loader to others: the training reads it."""
        self.data.forget(name)
        self.workers.forget(name)


def _parts(loader: Any) -> dict[str, Any]:
    """Return what a loader is read with, by name."""
    content = content_of(getattr(loader, "dataset", None), getattr(loader, "collate_fn", None))
    return {**content, **order_parts(loader)}


def order_parts(loader: Any) -> dict[str, Any]:
    """Return what the order follows from in which a loader reads its dataset, by name."""
    found = {each: getattr(loader, each, None) for each in ("sampler", "batch_sampler")}
    found |= {type(loader).__name__: loader} if begins_itself(loader) else {}
    return {**found, "loader": {"generator": getattr(loader, "generator", None)}}


def _position(tracked: TrackedLoader) -> LoaderPosition:
    """Return the position between two passes, or within one that was left."""
    is_left = tracked.fetched and not tracked.exhausted
    return tracked.position(tracked.fetched) if is_left else tracked.position_between()


def _outlives_a_pass(loader: Any) -> bool:
    """Return whether a loader is one of torch whose workers outlive its passes, in an order that can be repeated."""
    from torch.utils.data import DataLoader

    is_kept = isinstance(loader, DataLoader) and loader.num_workers > 0 and loader.persistent_workers
    return is_kept and getattr(loader, "in_order", True)


def datasets_of(loader: Any) -> list[Any]:
    """Return the dataset of a loader, with those that it holds one another, as a ``Subset`` does."""
    found: list[Any] = []
    each = loader
    while (each := getattr(each, "dataset", None)) is not None and not any(each is other for other in found):
        found.append(each)
    return found
