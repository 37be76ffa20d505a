"""The position of a loader whose order does not depend on the number of ranks and workers.

A loader is elastic through its sampler (:class:`ElasticMapPosition`) or its dataset (:class:`ElasticStreamPosition`),
whatever wraps them. Its position is counted in samples, and can be restored with other ranks, batch sizes and workers.
It is reached in constant time; other samplers yield every batch before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeAlias, runtime_checkable

from resume_adapters.core.dataloader.cursor import ReaderProgress, SampleCursor, ShardProgress, merge
from resume_adapters.core.dataloader.sampler import turns


@runtime_checkable
class ElasticOrder(Protocol):
    """A sampler with one global order, such as :class:`resume_adapters.data.ElasticSampler`."""

    size: int
    world_size: int

    def cursor(self, taken: int) -> SampleCursor:
        """Return the position after ``taken`` samples of this pass on each rank."""

    def seek(self, cursor: SampleCursor) -> None:
        """Begin the next pass at a position."""


@runtime_checkable
class ElasticStream(Protocol):
    """A dataset of shards, such as :class:`resume_adapters.data.ElasticShards`."""

    base: ShardProgress

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass."""

    def begin(self) -> Mapping[int, ReaderProgress]:
        """Begin a pass in this copy of the dataset, and return the progress of each reader."""

    def reader_progress(self) -> tuple[int, int, ReaderProgress]:
        """Return the number of this copy's reader, the number of readers, and its progress."""

    def progress(self, readers: int, reached: Mapping[int, ReaderProgress]) -> ShardProgress:
        """Return the merged progress of some readers of this pass."""

    def resume(self, base: ShardProgress, reached: Mapping[int, ReaderProgress]) -> None:
        """Begin the next pass at a position."""


def find(loader: Any, kept: int) -> ElasticPosition | None:
    """Return what reads and sets the position of an elastic loader; ``None`` where the loader is not elastic.

    Args:
        loader: a ``torch.utils.data.DataLoader``.
        kept: how many batches may be prefetched.
    """
    stream = stream_of(loader.dataset)
    if stream is not None:
        return ElasticStreamPosition(stream, kept)
    for batches in _chain(loader.batch_sampler, "batch_sampler"):
        for sampler in (batches, getattr(batches, "sampler", None)):
            if isinstance(sampler, ElasticOrder):
                return ElasticMapPosition(sampler, loader.batch_sampler, batches.batch_size)
    return None


def stream_of(dataset: Any) -> ElasticStream | None:
    """Return the elastic stream among a dataset and what it wraps."""
    return next((each for each in _chain(dataset, "dataset") if isinstance(each, ElasticStream)), None)


def _chain(outer: Any, name: str) -> Iterator[Any]:
    while outer is not None:
        yield outer
        outer = getattr(outer, name, None)


class ElasticMapPosition:
    """The position of a loader with an elastic sampler.

    Args:
        outer: the loader's batch sampler, which may divide the batches of the inner one among the ranks.
        batch_size: samples in a batch of the inner one.
    """

    def __init__(self, sampler: ElasticOrder, outer: Any, batch_size: int) -> None:
        self.sampler = sampler
        self._taken = batch_size * turns(outer)
        self._drops_last = bool(getattr(outer, "drop_last", False))
        self._begun: int | None = None

    def begin(self, batches: int) -> None:
        """Begin a pass at a batch of its epoch."""
        self._begun = batches

    def reader_progress(self) -> None:
        """Return ``None``: the position of the sampler follows from the number of batches."""

    def add(self, number: int, progress: Any) -> None:
        """Add a fetched batch (no-op)."""

    def position(self, consumed: int, start: int) -> dict[str, Any]:
        """Return the position after ``consumed`` batches, and after the ``start`` batches at which to resume."""
        assert self._begun is not None, "a pass is under way"
        begun = self._begun
        here, before = (self.sampler.cursor((batches - begun) * self._taken) for batches in (consumed, start))
        return {"cursor": here.to_tree(), "start": before.to_tree()}

    def end(self) -> dict[str, Any]:
        """Return the position at the end of this pass, or at the start of the first one."""
        here = self.sampler.cursor(0)
        over = (here if self._begun is None else replace(here, consumed=self.sampler.size)).to_tree()
        return {"cursor": over, "start": over}

    def left(self, position: dict[str, Any], global_batch: int) -> int | None:
        """Return how many batches of ``global_batch`` samples are left of the epoch after a position."""
        samples = self.sampler.size - int(position["cursor"]["consumed"])
        return samples // global_batch if self._drops_last else -(-samples // global_batch)

    def workers_started(self) -> None:
        """Begin the pass of the workers in this process too (no-op)."""

    def seek(self, position: dict[str, Any]) -> None:
        """Begin the next pass where a position says to resume."""
        self.sampler.seek(SampleCursor(**position["start"]))

    def reshard(self, positions: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the position of all ranks, to resume exactly there."""
        return {**positions[0], "start": positions[0]["cursor"]}


class ElasticStreamPosition:
    """The position of a loader with an elastic stream.

    Args:
        kept: how many batches may be prefetched.
    """

    def __init__(self, stream: ElasticStream, kept: int) -> None:
        self.stream = stream
        self._readers = 0
        self._before: dict[int, ReaderProgress] = {}
        self._recent: deque[tuple[int, int, ReaderProgress]] = deque()
        self._kept = kept

    def begin(self, batches: int) -> None:
        """Begin a pass."""
        self._before = {}
        self._recent.clear()

    def reader_progress(self) -> tuple[int, int, ReaderProgress]:
        """Return the reader of this process, the number of readers, and its progress."""
        return self.stream.reader_progress()

    def add(self, number: int, progress: tuple[int, int, ReaderProgress]) -> None:
        """Add a fetched batch, with the progress of its reader after the fetch."""
        reader, self._readers, reached = progress
        self._recent.append((number, reader, reached))
        if len(self._recent) > self._kept:
            _, reader, reached = self._recent.popleft()
            self._before[reader] = reached

    def position(self, consumed: int, start: int) -> dict[str, Any]:
        """Return the position after ``consumed`` batches, and that of each reader after the ``start`` batches."""
        return {
            "base": self.stream.base.to_tree(),
            "start": [[reader, *reached] for reader, reached in self._reached(start).items()],
            "cursor": self.stream.progress(self._readers, self._reached(consumed)).to_tree(),
        }

    def _reached(self, batches: int) -> dict[int, ReaderProgress]:
        return self._before | {reader: reached for number, reader, reached in self._recent if number < batches}

    def end(self) -> dict[str, Any]:
        """Return the position at the end of this pass."""
        return {"over": self.stream.base.epoch}

    def left(self, position: dict[str, Any], global_batch: int) -> int | None:
        """Return ``None``: a stream does not know its length."""
        return None

    def workers_started(self) -> None:
        """Begin the pass of the workers in this process too."""
        self.stream.begin()

    def seek(self, position: dict[str, Any]) -> None:
        """Begin the next pass where a position says that each reader resumes."""
        if "over" in position:
            self.stream.set_epoch(position["over"])
            return
        reached = {reader: (finished, offset) for reader, finished, offset in position["start"]}
        self.stream.resume(ShardProgress.from_tree(position["base"]), reached)
        self._before = dict(reached)

    def reshard(self, positions: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the merged position of all ranks, with no shards assigned yet."""
        if "over" in positions[0]:
            return positions[0]
        merged = merge(ShardProgress.from_tree(position["cursor"]) for position in positions).to_tree()
        return {"base": merged, "start": [], "cursor": merged}


ElasticPosition: TypeAlias = ElasticMapPosition | ElasticStreamPosition
