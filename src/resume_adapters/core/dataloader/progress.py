"""What a loader has fetched, and the position made of it."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

from resume_adapters.core.dataloader import elastic
from resume_adapters.core.dataloader.sampler import LoaderRandomState
from resume_adapters.core.state import encoding, rng
from resume_adapters.core.state.records import Record, Stored
from resume_adapters.core.state.rng import GeneratorState

_WATCHED = 8
"""Fetches of a launch that are watched for random numbers."""

_KEPT = 64
"""Least number of fetched batches whose random state is kept; no loader of the four frameworks prefetches more."""


@dataclass(kw_only=True)
class LoaderPosition(Record):
    """Where a loader is in its data, and the random state that shapes the rest of its pass.

    Attributes:
        ended: every batch of the pass was consumed, or no pass has begun.
        consumed: batches of the pass that completed steps have used.
        start: the batch from which to fetch again; at most ``consumed``.
        prefetched: batches fetched after ``consumed``.
        spawn: the loader's random state when its workers were started.
        sampler: the random state with which the sampler began the pass.
        rng_before: the random state before each prefetched batch; empty with workers, where the fetch does not draw.
        pool: each worker's random state before its first batch at or after ``start``.
        proof: index and digest of the last prefetched batch.
        generators: the state of the loader's own generators.
        step: the random state of the process, and of generators that the user registered; ``None`` in a position that
            was not saved (see :meth:`TrackedLoader.skip`).
        elastic: the position in terms of samples, on any topology; ``None`` where that is not known.
        workers: the loader's ``num_workers``.
        length: length of the dataset; ``None`` where it has none.
        batch_size: samples in a batch; ``None`` where the loader does not say.
        plain: the batches follow from their indices alone, so that any number of workers yields the same ones.
        as_made: the pass is one that the loader had begun when it was made, with the samplers that it had then.
    """

    ended: bool
    consumed: int
    start: int
    prefetched: Annotated[int, Stored("ahead")]
    spawn: dict[str, Any] | None
    sampler: dict[str, Any] | None
    rng_before: Annotated[list[Any], Stored("before")]
    pool: dict[int, Any]
    proof: list[Any] | None
    generators: dict[str, Any]
    step: dict[str, Any] | None
    elastic: dict[str, Any] | None
    workers: int
    length: int | None
    batch_size: int | None
    plain: bool = False
    as_made: bool = False


class Fetch(NamedTuple):
    """One fetched batch.

    Attributes:
        number: its number in the pass.
        before: the random state before the fetch; ``None`` with workers.
        worker: the worker that fetched it; ``None`` without workers.
        worker_state: the worker's random state after the fetch.
    """

    number: int
    before: tuple[Any, dict[str, Any]] | None
    worker: int | None
    worker_state: Any


class WorkerStates:
    """The random state of a loader's workers.

    Args:
        loader: a ``torch.utils.data.DataLoader``.

    Attributes:
        are_kept: the workers outlive a pass.
        spawn: the loader's random state when the workers were started; ``None`` before that.
        at_start: each worker's state at the start of this pass, as far as it is known.
    """

    def __init__(self, loader: Any) -> None:
        self.are_kept = bool(loader.num_workers and loader.persistent_workers)
        self.spawn: dict[str, Any] | None = None
        self.at_start: dict[int, Any] = {}
        self._now: dict[int, Any] = {}

    @property
    def are_running(self) -> bool:
        """Whether the next pass uses the workers of this one."""
        return self.are_kept and self.spawn is not None

    def restore(self, spawn: dict[str, Any] | None, states: Mapping[int, Any]) -> None:
        """Set how the workers were started, and their states."""
        self.spawn, self._now = spawn, dict(states)

    def begin_pass(self) -> None:
        """Keep the states as those of the start of a pass."""
        self.at_start = dict(self._now)

    def update(self, worker: int, state: Any) -> None:
        """Set the state of a worker."""
        self._now[worker] = state

    def between_passes(self) -> dict[int, Any]:
        """Return the states of workers that outlive the pass."""
        return dict(self._now) if self.are_kept else {}


class FetchLog:
    """Fetches the batches of a loader, and makes positions of what it fetched.

    Args:
        loader: a ``torch.utils.data.DataLoader``.
        random_state: the random state that shapes the loader's order.

    Attributes:
        fetched: batches fetched in this pass, counted from the start of its epoch.
        exhausted: the pass has ended.
        is_stream: the dataset is iterable, not map-style.
        elastic: the loader's position on any topology; ``None`` where it is not elastic.
        workers: the random state of the workers.
        generators: the generators that the user registered.
    """

    def __init__(self, loader: Any, random_state: LoaderRandomState) -> None:
        from torch.utils.data import IterableDataset

        self.fetched = 0
        self.exhausted = False
        self.is_stream = isinstance(loader.dataset, IterableDataset)
        self.workers = WorkerStates(loader)
        self._loader = loader
        self._random_state = random_state
        self.generators: Mapping[str, GeneratorState] = {}
        kept = max(_KEPT, 4 * loader.num_workers)
        self.elastic = elastic.find(loader, kept)
        self._recent: deque[Fetch] = deque(maxlen=kept)
        self._last_batch: Any = None
        self._begun = 0
        held = [getattr(each, "__dict__", {}) for each in (loader.dataset, loader.collate_fn)]
        self._has_generators = any(rng.is_generator(value) for each in held for value in each.values())
        self._watched = 0
        self._has_drawn = False

    def capture_generators(self, generators: Mapping[str, GeneratorState]) -> None:
        """Capture the state of these generators with every position from now on."""
        self.generators = generators

    def begin(self, start: int = 0) -> None:
        """Begin a pass at a batch of its epoch."""
        self._recent.clear()
        self._last_batch = None
        self.fetched = self._begun = start
        self.exhausted = False

    def fetch(self, batches: Iterator[Any]) -> Any:
        """Return the next batch of the loader's own iterator.

        Raises:
            StopIteration: the pass has ended.
        """
        # Without workers the fetch itself may draw random numbers, so a prefetch must be repeatable.
        before = None if self._loader.num_workers else (rng.capture_cpu(), rng.capture_generators(self.generators))
        try:
            batch = next(batches)
        except StopIteration:
            self.exhausted = True
            raise
        worker: int | None = None
        worker_state: Any = None
        progress: Any = None
        if self._loader.num_workers:
            batch, worker, worker_state, progress = batch
            self.workers.update(worker, worker_state)
        elif self.elastic:
            progress = self.elastic.reader_progress()
        if self.elastic:
            self.elastic.add(self.fetched, progress)
        self._watch(before, worker_state, worker)
        self._recent.append(Fetch(self.fetched, before, worker, worker_state))
        self._last_batch = batch
        self.fetched += 1
        return batch

    def _watch(self, before: tuple[Any, dict[str, Any]] | None, worker_state: Any, worker: int | None) -> None:
        """Look whether a fetch drew random numbers: of the first in a pass, the sampler may."""
        if self._has_drawn or self._watched >= _WATCHED or self.fetched == self._begun:
            return
        if before is not None:
            after = rng.cpu_to_tree(rng.capture_cpu())
            self._watched += 1
            self._has_drawn = encoding.digest_of(rng.cpu_to_tree(before[0])) != encoding.digest_of(after)
            return
        former = next((each.worker_state for each in reversed(self._recent) if each.worker == worker), None)
        if former is not None:
            self._watched += 1
            self._has_drawn = encoding.digest_of(former) != encoding.digest_of(worker_state)

    @property
    def may_have_other_workers(self) -> bool:
        """Whether the loader would yield the same batches with any number of workers, if no fetch draws."""
        return not (self.is_stream or self.elastic or self.workers.are_kept or self.generators or self._has_generators)

    def position(self, consumed: int, sampler: dict[str, Any] | None) -> LoaderPosition:
        """Return the position after ``consumed`` batches of this pass, with the current random state.

        Args:
            consumed: batches that completed steps have used; at most those fetched.
            sampler: the random state with which the sampler began this pass.
        """
        assert consumed <= self.fetched, f"{consumed} batches used, {self.fetched} fetched"
        prefetched = [fetch for fetch in self._recent if fetch.number >= consumed]
        ended = self.exhausted and not prefetched
        start = consumed if ended else self.replay_start(consumed)
        digest = encoding.digest_of(self._last_batch) if prefetched else None
        between = self.position_between()
        return replace(
            between,
            ended=ended,
            consumed=consumed,
            start=start,
            prefetched=len(prefetched),
            spawn=self.workers.spawn,
            sampler=sampler,
            rng_before=[_before_to_tree(fetch.before) for fetch in prefetched if fetch.before is not None],
            pool=self._worker_states_at(start),
            proof=None if digest is None else [self.fetched - 1, digest],
            elastic=self.elastic.position(consumed, start) if self.elastic and not ended else between.elastic,
        )

    def position_between(self) -> LoaderPosition:
        """Return the position between two passes, with the current random state."""
        return LoaderPosition(
            ended=True,
            consumed=0,
            start=0,
            prefetched=0,
            spawn=self.workers.spawn if self.workers.are_kept else None,
            sampler=None,
            rng_before=[],
            pool=self.workers.between_passes(),
            proof=None,
            generators=self._random_state.generators(),
            step=rng.capture_with(self.generators),
            elastic=self.elastic.end() if self.elastic else None,
            workers=self._loader.num_workers,
            length=length_of(self._loader.dataset),
            batch_size=batch_size(self._loader),
            plain=self.may_have_other_workers and self._watched > 0 and not self._has_drawn,
        )

    def replay_start(self, consumed: int) -> int:
        """Return the batch from which to fetch again, so that each worker fetches the batches that it had fetched."""
        if self.is_stream and self.elastic is None:
            return 0
        workers: int = self._loader.num_workers
        if not workers:
            return consumed
        if not self.is_stream:
            return self._begun + (consumed - self._begun) // workers * workers
        # The workers take turns, but one that has no shards left drops out: a round begins where their numbers fall.
        known = [(fetch.number, fetch.worker or 0) for fetch in self._recent if fetch.number <= consumed]
        rounds = [index for (_, last), (index, worker) in itertools.pairwise(known) if worker <= last]
        return max(rounds, default=self._begun)

    def _worker_states_at(self, index: int) -> dict[int, Any]:
        """Return each worker's random state before its first batch at or after ``index``."""
        states = dict(self.workers.at_start)
        for fetch in self._recent:
            if fetch.number < index and fetch.worker is not None:
                states[fetch.worker] = fetch.worker_state
        return states


def _before_to_tree(before: tuple[Any, dict[str, Any]]) -> dict[str, Any]:
    return {"cpu": rng.cpu_to_tree(before[0]), "registered": before[1]}


def batch_size(loader: Any) -> int | None:
    """Return the samples in a batch, also of a loader that has a batch sampler; ``None`` where it does not say."""
    found: int | None = loader.batch_size
    return getattr(loader.batch_sampler, "batch_size", None) if found is None else found


def length_of(thing: Any) -> int | None:
    """Return the length of a dataset or of a loader; ``None`` where it has none."""
    try:
        return len(thing)
    except TypeError:
        return None
