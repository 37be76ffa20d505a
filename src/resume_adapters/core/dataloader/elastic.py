"""The position of a loader whose order does not depend on the number of ranks and workers.

A loader is elastic through its sampler (:class:`Sampling`) or through its dataset (:class:`Streaming`), whatever wraps
them. Its position is then known in samples, and can be taken up with other ranks, batch sizes and workers. With the
same ones it is found in constant time, instead of by asking the sampler for every batch before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from resume_adapters.core.dataloader.cursor import ReaderProgress, SampleCursor, ShardProgress, merge

Tree = dict[str, Any]


@runtime_checkable
class ElasticOrder(Protocol):
    """A sampler with one global order, such as :class:`resume_adapters.data.ElasticSampler`."""

    size: int
    world_size: int

    def cursor(self, taken: int) -> SampleCursor:
        """Return the position after ``taken`` samples of this pass on each rank."""

    def seek(self, cursor: SampleCursor) -> None:
        """Let the next pass begin there."""


@runtime_checkable
class ElasticStream(Protocol):
    """A dataset of shards, such as :class:`resume_adapters.data.ElasticShards`."""

    base: ShardProgress

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be of this epoch."""

    def begin(self) -> Mapping[int, ReaderProgress]:
        """Begin a pass in this copy."""

    def reached(self) -> tuple[int, int, ReaderProgress]:
        """Return which reader this copy is, of how many, and how far it is."""

    def progress(self, readers: int, reached: Mapping[int, ReaderProgress]) -> ShardProgress:
        """Return what some of the readers of this pass have consumed together."""

    def resume(self, base: ShardProgress, reached: Mapping[int, ReaderProgress]) -> None:
        """Let the next pass begin there."""


def find(loader: Any, kept: int) -> ElasticMapPosition | ElasticStreamPosition | None:
    """Return how to know and to set an elastic loader's position; ``None`` where it is not elastic.

    Args:
        loader: a ``torch.utils.data.DataLoader``.
        kept: how many fetched batches may be ahead of what is consumed.
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
    """An elastic sampler beneath a loader.

    Args:
        sampler: the sampler.
        outer: the loader's batch sampler, which may deal the batches of the inner one out to the ranks.
        batch_size: samples in a batch of the inner one.
    """

    def __init__(self, sampler: ElasticOrder, outer: Any, batch_size: int) -> None:
        self.sampler = sampler
        # Accelerate's BatchSamplerShard: each rank takes its turn, or its piece of every batch.
        turns = getattr(outer, "num_processes", 1) if not getattr(outer, "split_batches", False) else 1
        self._taken = batch_size * turns
        self._drops_last = bool(getattr(outer, "drop_last", False))
        self._begun: int | None = None

    def begin(self, batches: int) -> None:
        """Note that a pass begins at this batch of its epoch."""
        self._begun = batches

    def reached(self) -> None:
        """Return nothing: how far the sampler is follows from the number of batches."""

    def note(self, index: int, reached: Any) -> None:
        """Note that a batch was fetched: of no concern here."""

    def position(self, consumed: int, start: int) -> Tree:
        """Return the position after ``consumed`` batches, and where a pass is to begin to get there."""
        assert self._begun is not None, "a pass is under way"
        begun = self._begun
        here, before = (self.sampler.cursor((batches - begun) * self._taken) for batches in (consumed, start))
        return {"cursor": here.to_tree(), "start": before.to_tree()}

    def end(self) -> Tree:
        """Return the position at the end of this pass; before the first one, that of its start."""
        here = self.sampler.cursor(0)
        over = (here if self._begun is None else replace(here, consumed=self.sampler.size)).to_tree()
        return {"cursor": over, "start": over}

    def left(self, position: Tree, together: int) -> int | None:
        """Return how many batches of ``together`` samples, on all ranks, are left of the epoch after a position."""
        samples = self.sampler.size - int(position["cursor"]["consumed"])
        return samples // together if self._drops_last else -(-samples // together)

    def started(self) -> None:
        """Note that a pass has begun in the workers."""

    def seek(self, position: Tree) -> None:
        """Let the next pass begin at the start of a position."""
        self.sampler.seek(SampleCursor(**position["start"]))

    def moved(self, positions: Sequence[Tree]) -> Tree:
        """Return the position at which all ranks were together, as a place to begin."""
        return {**positions[0], "start": positions[0]["cursor"]}


class ElasticStreamPosition:
    """An elastic stream beneath a loader.

    Args:
        stream: the stream.
        kept: fetched batches to remember.
    """

    def __init__(self, stream: ElasticStream, kept: int) -> None:
        self.stream = stream
        self._readers = 0
        self._before: dict[int, ReaderProgress] = {}
        self._recent: deque[tuple[int, int, ReaderProgress]] = deque()
        self._kept = kept

    def begin(self, batches: int) -> None:
        """Note that a pass begins."""
        self._before = {}
        self._recent.clear()

    def reached(self) -> tuple[int, int, ReaderProgress]:
        """Return how far the stream of this process is."""
        return self.stream.reached()

    def note(self, index: int, reached: tuple[int, int, ReaderProgress]) -> None:
        """Note how far the reader of a batch was when it had fetched it."""
        reader, self._readers, far = reached
        self._recent.append((index, reader, far))
        if len(self._recent) > self._kept:
            _, reader, far = self._recent.popleft()
            self._before[reader] = far

    def position(self, consumed: int, start: int) -> Tree:
        """Return the position after ``consumed`` batches, and where each reader is to begin to get there."""
        return {
            "base": self.stream.base.to_tree(),
            "start": [[reader, *far] for reader, far in self._reached(start).items()],
            "cursor": self.stream.progress(self._readers, self._reached(consumed)).to_tree(),
        }

    def _reached(self, batches: int) -> dict[int, ReaderProgress]:
        return self._before | {reader: far for index, reader, far in self._recent if index < batches}

    def end(self) -> Tree:
        """Return the position at the end of this pass."""
        return {"over": self.stream.base.epoch}

    def left(self, position: Tree, together: int) -> int | None:
        """Return None: a stream does not say how many samples it has."""
        return None

    def started(self) -> None:
        """Note that a pass has begun in the workers."""
        self.stream.begin()

    def seek(self, position: Tree) -> None:
        """Let each reader of the next pass begin where it was."""
        if "over" in position:
            self.stream.set_epoch(position["over"])
            return
        far = {reader: (finished, offset) for reader, finished, offset in position["start"]}
        self.stream.resume(ShardProgress.from_tree(position["base"]), far)
        self._before = dict(far)

    def moved(self, positions: Sequence[Tree]) -> Tree:
        """Return the position that all ranks together had, with nothing of it dealt out yet."""
        if "over" in positions[0]:
            return positions[0]
        together = merge(ShardProgress.from_tree(position["cursor"]) for position in positions).to_tree()
        return {"base": together, "start": [], "cursor": together}
