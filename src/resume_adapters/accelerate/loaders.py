"""The loaders that an accelerator has prepared: watched beneath what ``prepare`` put around them, and their counts."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Annotated, Any

import accelerate
from accelerate.data_loader import DataLoaderAdapter, DataLoaderDispatcher, DataLoaderShard
from accelerate.utils import send_to_device

from resume_adapters.core.dataloader.dispatch import FirstSlice, fetches_per_batch
from resume_adapters.core.dataloader.evaluated import EvaluationLoader, EvaluationLoaders
from resume_adapters.core.dataloader.next_pass import AlreadyMade
from resume_adapters.core.dataloader.progress import batch_size
from resume_adapters.core.dataloader.sampler import LoaderRandomState
from resume_adapters.core.loop.loader import LoopLoader
from resume_adapters.core.patching import replaced
from resume_adapters.core.requirements import is_older
from resume_adapters.core.session.session import Session
from resume_adapters.core.state.records import FRESH, Record


@dataclass
class PreparedLoaderState(Record):
    """The counts of a prepared loader.

    Attributes:
        iteration: passes that Accelerate has counted; ``None`` for a loader that does not count.
        generators: the random state that it draws from.
        running: its persistent workers are running, though it is not given to the loop.
        first: what fills up the last batch of a dispatching loader's running pass.
        workers: the state of those workers; ``None`` where the version that saved it kept none.
        data: what has changed on the data of a loader that is not given to the loop; ``None`` as with ``workers``.
    """

    iteration: int | None
    generators: Annotated[dict[str, Any], FRESH]
    running: bool
    first: Any
    workers: EvaluationLoader | None = None
    data: list[Any] | None = None


class PreparedLoaders:
    """The loaders of an accelerator.

    Args:
        accelerator: an ``accelerate.Accelerator``, after ``prepare``.
    """

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self._prepared: list[Any] = accelerator._dataloaders  # seam: accelerate 1.15
        self._lasting = 0
        self._random_states: dict[int, LoaderRandomState] = {}
        self._first_slices: dict[int, Any] = {}
        self._dispatched: dict[int, tuple[FirstSlice, LoopLoader]] = {}
        self._replaced = contextlib.ExitStack()
        self._evaluations = EvaluationLoaders()
        self._given: set[int] = set()

    def begin_loop(self) -> None:
        """Remember which loaders there are: Accelerate keeps every one that is prepared later, in each epoch too.

        Those that are not given to the loop later are taken for loaders of evaluations.
        """
        self._lasting = len(self._prepared)
        self._watch()

    def _watch(self) -> None:
        for index, each in enumerate(map(_base, self._prepared[: self._lasting])):
            if index not in self._given:
                self._evaluations.watch(_NAME.format(index), each)

    def track(self, prepared: Any, session: Session) -> LoopLoader:
        """Track the torch loader beneath what ``prepare`` put around it."""
        index = _index(self._prepared, prepared)
        self._given.add(index)
        self._evaluations.forget(_NAME.format(index))
        accelerator, tracked = self._accelerator, session.loaders.track(_base(prepared))
        global_batch = _samples(prepared, accelerator.num_processes)
        if not isinstance(prepared, DataLoaderDispatcher):
            return LoopLoader(prepared, tracked, global_batch, looks_ahead=prepared is not tracked.loader)
        fetches = fetches_per_batch(session.run.ranks, splits=prepared.split_batches)
        first = FirstSlice(prepared, tracked)
        is_through = first.is_through
        loader = LoopLoader(prepared, tracked, global_batch, fetches, looks_ahead=True, is_through=is_through)
        if not prepared._drop_last:  # seam: accelerate 1.15
            index = min(index, self._lasting)
            if session.context is None or not session.context.has_other_ranks:  # which need another
                first.restore(send_to_device(self._first_slices.get(index), accelerator.device))
            self._replaced.enter_context(replaced(prepared, "slice_fn", first))
            self._dispatched[index] = (first, loader)
        return loader

    def _first_slice(self, index: int) -> Any:
        """Return what fills up the last batch of a dispatching loader's running pass; ``None`` between two passes."""
        if index not in self._dispatched:
            return self._first_slices.get(index)
        first, loader = self._dispatched[index]
        return None if loader.number is None else first.kept

    @property
    def length(self) -> int | None:
        """Batches in a pass over the first loader; ``None`` where none was prepared, or it is a stream."""
        try:
            return len(self._prepared[0])
        except (IndexError, TypeError):
            return None

    def states(self) -> list[PreparedLoaderState]:
        """Return the counts of each loader, and the random state that it draws from.

        Of those that were prepared within the loop, only the last.
        """
        lasting, late = self._prepared[: self._lasting], self._prepared[self._lasting :]
        self._evaluations.data.look()
        data = self._evaluations.data.capture()
        workers = {each.name: each for each in self._evaluations.workers.capture()}
        states = []
        for index, each in enumerate([*lasting, *late[-1:]]):
            name = _NAME.format(index)
            state = PreparedLoaderState(
                iteration=getattr(each, "iteration", None),
                generators=self._random_state(_base(each)).generators(),
                running=name in workers,
                first=self._first_slice(index),
                workers=workers.get(name),
                data=data.get(name),
            )
            states.append(state)
        return states

    def _random_state(self, loader: Any) -> LoaderRandomState:
        if id(loader) not in self._random_states:  # which keeps the loader
            self._random_states[id(loader)] = LoaderRandomState(loader)
        return self._random_states[id(loader)]

    def restore(self, saved: Sequence[PreparedLoaderState]) -> None:
        """Restore what :meth:`states` returned."""
        self._first_slices = {index: state.first for index, state in enumerate(saved)}
        named = {_NAME.format(index): state for index, state in enumerate(saved)}
        self._evaluations.data.restore({name: state.data or [] for name, state in named.items()})
        known = [state.workers for state in saved if state.workers is not None]
        self._evaluations.workers.restore([name for name, state in named.items() if state.running], known)
        self._watch()
        for loader, state in zip(self._prepared[: self._lasting], saved, strict=False):
            if state.iteration is not None:
                loader.iteration = state.iteration
            LoaderRandomState(_base(loader)).restore_generators(state.generators)

    def begin_epoch(self, epoch: int) -> None:
        """Set every loader's count of passes to the epochs done."""
        for loader in self._prepared:
            if hasattr(loader, "iteration"):
                loader.iteration = epoch

    def close(self) -> None:
        """Give dispatching loaders their own slicing function again, and detach those of evaluations."""
        self._replaced.close()
        self._evaluations.workers.close()

    @property
    def missing(self) -> dict[str, str]:
        """What changes on the data of evaluations and is not captured: paths, with the names of the types."""
        return self._evaluations.data.missing


_NAME = "prepared loader {}"


def _index(things: Sequence[Any], thing: Any) -> int:
    return next((index for index, each in enumerate(things) if each is thing), -1)


def _base(loader: Any) -> Any:
    return getattr(loader, "base_dataloader", loader)


def _samples(loader: Any, ranks: int) -> int:
    """Return the samples in a batch of a loader, on all ranks together; 0 where the loader does not say."""
    if isinstance(loader, DataLoaderDispatcher):  # its own total_batch_size asks the dataset
        return (batch_size(loader) or 0) * (1 if loader.split_batches else ranks)
    return int(getattr(loader, "total_batch_size", (batch_size(loader) or 0) * ranks))


def _samplers(loader: Any) -> list[tuple[Any, Any]]:
    """Return the samplers of a loader that ``prepare`` may replace, each after the one that holds it."""
    holders: list[Any] = [loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "batch_sampler", None)]
    return [(holder, holder.sampler) for holder in holders if hasattr(holder, "sampler")]


def _note_when_made(native: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(native)
    def init(self: Any, dataset: Any, use_stateful_dataloader: bool = False, *args: Any, **kwargs: Any) -> None:
        moment = LoaderRandomState(SimpleNamespace(**kwargs)).capture() if use_stateful_dataloader else None
        native(self, dataset, use_stateful_dataloader, *args, **kwargs)
        if moment is not None:
            self.base_dataloader.resume_made = AlreadyMade(moment, _samplers(self.base_dataloader))

    return init


def _empty_without_batches(native: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
    @functools.wraps(native)
    def batches(self: Any) -> Iterator[Any]:
        passing = native(self)
        first = next(passing, None)
        if first is None:
            self.end()
            return
        yield first
        yield from passing

    return batches


def _install() -> None:
    """Keep the random state at which ``prepare`` lets a ``StatefulDataLoader`` begin its first pass; once."""
    if not hasattr(DataLoaderAdapter.__init__, "__wrapped__"):
        adapter: Any = DataLoaderAdapter
        adapter.__init__ = _note_when_made(adapter.__init__)  # seam: accelerate 1.15
    # Before 1.9 an empty loader yields None, and then fails.
    if is_older(accelerate.__version__, "1.9") and not hasattr(DataLoaderShard.__iter__, "__wrapped__"):
        loader: Any = DataLoaderShard
        loader.__iter__ = _empty_without_batches(loader.__iter__)  # seam: accelerate 1.6


_install()
