"""What a loader has fetched, and the position made of it."""

from __future__ import annotations

import itertools
import operator
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

from resume_adapters.core.dataloader import elastic
from resume_adapters.core.dataloader.check_batch import BatchCheck, CheckBatch, makes_batches, require_before, word_hash
from resume_adapters.core.dataloader.sampler import LoaderRandomState, length_of, require_began_with, require_state
from resume_adapters.core.observed.loaders import WITH_CHANGES, LoaderAttributes, require_changes
from resume_adapters.core.state import encoding, rng
from resume_adapters.core.state.records import Record, Stored, Tried
from resume_adapters.core.state.rng import GeneratorState, capture_cpu

_WATCHED = 8
"""Fetches of a launch that are watched for random numbers."""

_KEPT = 64
"""Least number of fetched batches whose random state is kept; no loader of the four frameworks prefetches more."""


def _require_each(saved: Iterable[Any]) -> None:
    for each in saved:
        require_before(each)


def _require_workers(saved: Mapping[int, Any]) -> None:
    _require_each(saved.values())


def _require_attributes(saved: Mapping[str, Any]) -> None:
    for each in saved.values():
        require_changes(each)


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
        attributes: what has changed on the samplers (``"order"``), and on the dataset and the collate function
            (``"content"``); ``None`` where nothing has.
        rows: digests of rows of numbers in the dataset and the samplers as they were when the launch began, by path.
        check: a batch of the pass that was under way or had ended, to be fetched again where no proof is.
        word_hash: the hash of a word in the process that saved, by which its sets have their order.
        order: the name of the order of samples that all ranks shared; ``None`` where they shared none, or where the
            version that saved did not look.
        draws: that order was drawn from the random state of the process.
    """

    ended: bool
    consumed: int
    start: int
    prefetched: Annotated[int, Stored("ahead")]
    spawn: Annotated[dict[str, Any] | None, Tried(require_state)]
    sampler: Annotated[dict[str, Any] | None, Tried(require_began_with)]
    rng_before: Annotated[list[Any], Stored("before"), Tried(_require_each)]
    pool: Annotated[dict[int, Any], Tried(_require_workers)]
    proof: Annotated[list[Any] | None, Tried(operator.itemgetter(0, 1))]
    generators: Annotated[dict[str, Any], Tried(rng.require_generators)]
    step: Annotated[dict[str, Any] | None, Tried(rng.require_with)]
    elastic: dict[str, Any] | None
    workers: int
    length: int | None
    batch_size: int | None
    plain: bool = False
    as_made: bool = False
    attributes: Annotated[dict[str, Any] | None, Tried(_require_attributes)] = None
    rows: dict[str, str] | None = None
    check: CheckBatch | None = None
    word_hash: int | None = None
    order: str | None = None
    draws: bool = True


class Fetch(NamedTuple):
    """One fetched batch.

    Attributes:
        number: its number in the pass.
        before: the random state before the fetch, and what has changed on the dataset; ``None`` with workers.
            :func:`_saved` makes what a position holds of it.
        worker: the worker that fetched it; ``None`` without workers.
        worker_state: the worker's random state after the fetch.
    """

    number: int
    before: dict[str, Any] | None
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
        attributes: what changes on the loader's samplers, ``"order"``, and on the rest of it, ``"content"``.
        rows: as :attr:`LoaderPosition.rows`.

    Attributes:
        fetched: batches fetched in this pass, counted from the start of its epoch.
        exhausted: the pass has ended.
        is_stream: the dataset is iterable, not map-style.
        elastic: the loader's position on any topology; ``None`` where it is not elastic.
        workers: the random state of the workers.
        generators: the generators that the user registered.
        check: keeps a batch of each pass to be fetched again.
    """

    def __init__(
        self,
        loader: Any,
        random_state: LoaderRandomState,
        attributes: Mapping[str, LoaderAttributes],
        rows: dict[str, str] | None = None,
    ) -> None:
        from torch.utils.data import IterableDataset

        self.fetched = 0
        self.exhausted = False
        self.is_stream = isinstance(loader.dataset, IterableDataset)
        self.workers = WorkerStates(loader)
        self._loader = loader
        self._random_state = random_state
        self._attributes = attributes
        self._rows = rows
        self._content = attributes["content"]
        self._has_workers = bool(loader.num_workers)
        self.generators: Mapping[str, GeneratorState] = {}
        self.check = BatchCheck(loader)
        kept = max(_KEPT, 4 * loader.num_workers)
        self.elastic = elastic.find(loader, kept)
        self._is_read_again = self.is_stream and self.elastic is None
        self._recent: deque[Fetch] = deque(maxlen=kept)
        self._last_batch: Any = None
        self._begun = 0
        held = [getattr(each, "__dict__", {}) for each in (loader.dataset, loader.collate_fn)]
        self._has_generators = any(rng.is_generator(value) for each in held for value in each.values())
        self._watched = 0
        self._is_watching = True
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
        self.check.begin_pass()

    def fetch(self, batches: Iterator[Any]) -> Any:
        """Return the next batch of the loader's own iterator.

        Raises:
            StopIteration: the pass has ended.
        """
        # Without workers the fetch itself may draw random numbers, so a prefetch must be repeatable.
        has_workers = self._has_workers
        before = None if has_workers else self._before()
        try:
            batch = next(batches)
        except StopIteration:
            self.exhausted = True
            raise
        worker: int | None = None
        worker_state: Any = None
        progress: Any = None
        number = self.fetched
        if has_workers:
            batch, worker, worker_state, progress = batch
            self.workers.update(worker, worker_state)
        elif self.elastic:
            progress = self.elastic.reader_progress()
        if self.elastic:
            self.elastic.add(number, progress)
        if len(worker_state) == WITH_CHANGES if before is None else "content" in before:
            self._has_drawn = True
        if self._is_watching:
            self._watch(before, worker_state, worker)
        if self.check.waits and number - self._begun == self.check.number:
            self.check.add(batch, self._last_state_of(worker))
        self._recent.append(Fetch(number, before, worker, worker_state))
        self._last_batch = batch
        self.fetched = number + 1
        return batch

    def note(self, indices: Any) -> None:
        """Note the indices of the batch that a later launch is to fetch again; in workers it is known by its number."""
        self.check.note(indices, lambda: None if self._has_workers else _saved(self._before()))

    def _before(self) -> dict[str, Any]:
        """Return what a fetch in this process may draw from or change."""
        self._content.look_if_replaced()
        before = {"cpu": capture_cpu(), "registered": rng.capture_generators(self.generators)}
        content = self._content.capture()
        return {**before, "content": content} if content else before

    def _watch(self, before: dict[str, Any] | None, worker_state: Any, worker: int | None) -> None:
        """Look whether one of the first fetches drew random numbers or changed an object."""
        looks_again = self._content.look_early("fetch")
        if not self._has_drawn and self.fetched > self._begun:  # in the first of a pass, the sampler may draw
            former, now = self._last_state_of(worker), worker_state
            if before is not None:
                former, now = rng.cpu_to_tree(before["cpu"]), rng.cpu_to_tree(capture_cpu())
            if former is not None:
                self._watched += 1
                self._has_drawn = encoding.digest_of(former) != encoding.digest_of(now)
        self._is_watching = looks_again or not (self._has_drawn or self._watched >= _WATCHED)

    def _last_state_of(self, worker: int | None) -> Any:
        """Return the state of a worker after the batch that it has fetched last in this pass; ``None`` before one."""
        return next((each.worker_state for each in reversed(self._recent) if each.worker == worker), None)

    @property
    def may_have_other_workers(self) -> bool:
        """Whether the loader would yield the same batches with any number of workers, if no fetch draws."""
        return not (self.is_stream or self.elastic or self.workers.are_kept or self.generators or self._has_generators)

    def position(
        self, consumed: int, process: Mapping[str, Any], sampler: dict[str, Any] | None, *, as_made: bool
    ) -> LoaderPosition:
        """Return the position after ``consumed`` batches of this pass.

        Args:
            consumed: batches that completed steps have used; at most those fetched.
            process: the current random state of the process, as a tree.
            sampler: the random state with which the sampler began this pass.
            as_made: the pass is one that the loader had begun when it was made.
        """
        assert consumed <= self.fetched, f"{consumed} batches used, {self.fetched} fetched"
        ahead = min(self.fetched - consumed, len(self._recent))
        prefetched = [self._recent[-each] for each in range(ahead, 0, -1)]
        ended = self.exhausted and not ahead
        start = consumed if ended else 0 if self._is_read_again else self.replay_start(consumed)
        is_known = ahead and not self._are_told_at_once
        digest = encoding.digest_of(self._last_batch) if is_known else None
        pool = dict(self.workers.at_start)
        for fetch in self._recent if self._has_workers else ():
            if fetch.number < start and fetch.worker is not None:
                pool[fetch.worker] = fetch.worker_state
        return replace(
            self._position(self._spawn(), pool, process),
            ended=ended,
            consumed=consumed,
            start=start,
            prefetched=ahead,
            sampler=sampler,
            rng_before=[_saved(fetch.before) for fetch in prefetched if fetch.before is not None],
            proof=None if digest is None else [self.fetched - 1, digest],
            elastic=(self.elastic.end() if ended else self.elastic.position(consumed, start)) if self.elastic else None,
            as_made=as_made,
        )

    def position_between(self, process: Mapping[str, Any]) -> LoaderPosition:
        """Return the position between two passes.

        Args:
            process: the current random state of the process, as a tree.
        """
        workers = self.workers
        return self._position(self._spawn() if workers.are_kept else None, workers.between_passes(), process)

    @property
    def _are_told_at_once(self) -> bool:
        """Whether workers see a change of the process whichever batch they are at: that batch cannot be repeated."""
        return self._has_workers and self._content.changes_shared

    def _spawn(self) -> dict[str, Any] | None:
        """Return what workers started with; those that are kept do not see what the process changes on its dataset."""
        if self.workers.spawn is None or not self.workers.are_kept:
            return self.workers.spawn
        kept = self._content.kept()
        places = [each[:2] for each in kept]
        others = [each for each in self.workers.spawn.get("content", []) if each[:2] not in places]
        return {**self.workers.spawn, **({"content": [*others, *kept]} if kept else {})}

    def start_workers(self) -> None:
        """Restore what the workers that start now begin with, on the dataset of which they get copies."""
        assert self.workers.spawn is not None
        self._random_state.restore(self.workers.spawn)
        saved = self.workers.spawn.get("content", [])
        if self.workers.are_kept:
            self._content.restore_kept(saved)
        else:
            self._content.restore(saved, leaves_shared=self._has_workers)
        self.keep()

    def keep(self) -> None:
        """Copy what the workers that start now have, if they outlive the pass."""
        if self.workers.are_kept:
            self._content.keep()

    def _position(
        self, spawn: dict[str, Any] | None, pool: dict[int, Any], process: Mapping[str, Any]
    ) -> LoaderPosition:
        """Return the position between two passes, with these states of workers."""
        loader, registered = self._loader, rng.capture_generators(self.generators)
        return LoaderPosition(
            ended=True,
            consumed=0,
            start=0,
            prefetched=0,
            spawn=spawn,
            sampler=None,
            rng_before=[],
            pool=pool,
            proof=None,
            generators=self._random_state.generators(),
            step={"process": dict(process), "registered": registered},
            elastic=self.elastic.end() if self.elastic else None,
            workers=loader.num_workers,
            length=length_of(loader.dataset),
            batch_size=batch_size(loader),
            plain=self.may_have_other_workers and self._watched > 0 and not self._has_drawn,
            attributes=self._changed_attributes(),
            rows=self._rows,
            check=None if self._content.missing or self._are_told_at_once else self.check.kept,  # it would be another
            word_hash=word_hash(),
        )

    def _changed_attributes(self) -> dict[str, Any] | None:
        for each in self._attributes.values():
            each.look_early("position")
        found = {name: each.capture() for name, each in self._attributes.items()}
        return found if any(found.values()) else None

    @property
    def missing(self) -> dict[str, str]:
        """What changes on samplers, dataset or collate function and is not captured: paths, with names of types."""
        return {path: kind for each in self._attributes.values() for path, kind in each.missing.items()}

    def content(self) -> list[Any]:
        """Return what has changed on the dataset and the collate function by now, where a pass begins."""
        self.look()
        return self._content.capture()

    def look(self) -> None:
        """Find what has changed on samplers, dataset and collate function, where a pass begins or before a save."""
        for each in self._attributes.values():
            each.look()

    def restore_content(self, saved: list[Any]) -> None:
        """Restore what :meth:`content` returned."""
        self._attributes["content"].restore(saved)

    def restore_shared(self, position: LoaderPosition) -> None:
        """Restore what workers that start now see as it is, and not as it was when their predecessors were started."""
        self._content.restore_shared((position.attributes or {}).get("content", []))

    def places(self) -> set[Any]:
        """Return where what is known to change on the loader's objects is."""
        return set().union(*(each.places() for each in self._attributes.values()))

    def restore_attributes(
        self, position: LoaderPosition, *, content: bool = True, without: Set[Any] = frozenset()
    ) -> None:
        """Restore what has changed on the loader's objects, as it was when a position was captured.

        Args:
            content: also on the dataset and the collate function, not only on the samplers.
            without: the places of what others have restored.
        """
        for name, saved in (position.attributes or {}).items():
            if content or name == "order":
                self._attributes[name].restore(saved, without)

    def restore_before(self, before: Mapping[str, Any]) -> None:
        """Restore the random state before a fetch, and what had changed on the dataset, as a position has them."""
        self.restore_content(before.get("content", []))  # first: what it has of a start may be a registered generator
        rng.restore_cpu(rng.cpu_from_tree(before["cpu"]))
        rng.restore_generators(before["registered"], self.generators)

    def fetch_again(self, batch: CheckBatch) -> Any:
        """Return a batch that another launch has fetched, as it is in this one. The random state stays as it is."""
        loader = self._loader
        now = _saved(self._before())
        self.restore_before(batch.before)
        try:
            return batch.fetched_from(loader.dataset, loader.collate_fn, makes_batches=makes_batches(loader))
        finally:
            self.restore_before(now)

    def replay_start(self, consumed: int) -> int:
        """Return the batch from which to fetch again, so that each worker fetches the batches that it had fetched."""
        workers: int = self._loader.num_workers
        if not workers:
            return consumed
        if not self.is_stream:
            return self._begun + (consumed - self._begun) // workers * workers
        # The workers take turns, but one that has no shards left drops out: a round begins where their numbers fall.
        known = [(fetch.number, fetch.worker or 0) for fetch in self._recent if fetch.number <= consumed]
        rounds = [index for (_, last), (index, worker) in itertools.pairwise(known) if worker <= last]
        return max(rounds, default=self._begun)


def _saved(before: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was before a fetch as :attr:`LoaderPosition.rng_before` has it."""
    return {**before, "cpu": rng.cpu_to_tree(before["cpu"])}


def batch_size(loader: Any) -> int | None:
    """Return the samples in a batch, also of a loader that has a batch sampler; ``None`` where it does not say."""
    found: int | None = loader.batch_size
    return getattr(loader.batch_sampler, "batch_size", None) if found is None else found
