"""Streams made of shards, for any number of ranks and workers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from resume_adapters.core.dataloader.cursor import ReaderProgress, ShardProgress, Share, advance, assign_shards, merge
from resume_adapters.core.state import rng
from resume_adapters.errors import StateMismatch


class ElasticShards(IterableDataset[Any]):
    """The records of many shards, each read by one worker of one rank at a time.

    Args:
        shards: one value for each shard, which ``read`` accepts: a path, a number.
        read: returns the records of a shard, the same ones in the same order at every call. A resume calls it for the
            shards that were partly read, and skips their consumed records.
        seed: seed of the order of the shards.
        shuffle: shuffle the shards; otherwise they are read in the order of their indices.
        rank: this rank, if the stream should assign the shards to the ranks; leave it out if the framework distributes
            the records.
        world_size: number of ranks, likewise.
    """

    def __init__(
        self,
        shards: Sequence[Any],
        read: Callable[[Any], Iterable[Any]],
        *,
        seed: int = 0,
        shuffle: bool = True,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__()
        self.shards = shards
        self.read = read
        self.seed = seed
        self.shuffle = shuffle
        self.rank = rank
        self.world_size = world_size
        self._resuming: tuple[ShardProgress, Mapping[int, ReaderProgress]] | None = None
        self.base = ShardProgress.start(0, seed)
        self._share: Share = []
        self._reader, self._readers, self._finished, self._offset = rank, world_size, 0, 0
        # Shared with worker processes, which have copies of this object: the epoch of the next pass.
        self._epoch = torch.zeros(1, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    @classmethod
    def of_dataset(cls, data: Any, **options: Any) -> ElasticShards:
        """Return a stream of the shards of a ``datasets.IterableDataset``.

        Args:
            data: the dataset; its order within a shard must be fixed.
            options: as for the class.
        """
        count: int = data.num_shards
        return cls(range(count), lambda shard: iter(data.shard(num_shards=count, index=shard)), **options)

    @property
    def epoch(self) -> int:
        """The epoch of the running pass, or of the next one."""
        return int(self._epoch[0])

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, which determines the order of the shards."""
        self._epoch[0] = epoch

    # ---- Reading

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        workers, number = (worker.num_workers, worker.id) if worker else (1, 0)
        self._reader, self._readers = self.rank * workers + number, self.world_size * workers
        reached = self.begin()
        self._share = assign_shards(len(self.shards), self.base, self._readers, shuffle=self.shuffle)[self._reader]
        self._finished, self._offset = reached.get(self._reader, (0, 0))
        return self._records()

    def begin(self) -> Mapping[int, ReaderProgress]:
        """Begin a pass in this copy, and return the progress of each reader. The next pass is a whole one.

        If workers read, the loader's own process calls this as well, so that its copy agrees with theirs.
        """
        resuming, self._resuming = self._resuming, None
        if resuming is None or resuming[0].epoch != self.epoch:
            resuming = ShardProgress.start(self.epoch, self.seed), {}
        self.base, reached = resuming
        return reached

    def _records(self) -> Iterator[Any]:
        while self._finished < len(self._share):
            shard, skip = self._share[self._finished]
            self._offset = max(self._offset, skip)
            records = iter(self.read(self.shards[shard]))
            if self._offset:
                before = rng.capture_cpu()  # skipped records drew their random numbers when they were consumed
                next(itertools.islice(records, self._offset, self._offset), None)
                rng.restore_cpu(before)
            for record in records:
                self._offset += 1
                yield record
            self._finished, self._offset = self._finished + 1, 0

    # ---- The position

    def reader_progress(self) -> tuple[int, int, ReaderProgress]:
        """Return the number of this copy's reader, the number of readers, and the reader's progress."""
        return self._reader, self._readers, (self._finished, self._offset)

    def progress(self, readers: int, reached: Mapping[int, ReaderProgress]) -> ShardProgress:
        """Return what the readers of this pass have consumed in total.

        Args:
            readers: number of readers of the pass.
            reached: the progress of each reader; one that is left out has read nothing.
        """
        shares = assign_shards(len(self.shards), self.base, readers, shuffle=self.shuffle)
        return merge([self.base, *(advance(self.base, shares[reader], *far) for reader, far in reached.items())])

    def resume(self, base: ShardProgress, reached: Mapping[int, ReaderProgress]) -> None:
        """Start the next pass where an earlier one was.

        Args:
            base: what was consumed when the shards were assigned.
            reached: the progress of each reader since; empty if the number of readers is different now.

        Raises:
            StateMismatch: the position was saved with a different seed.
        """
        if base.seed != self.seed:
            raise StateMismatch(
                f"the position in the stream was saved with seed {base.seed}, this one has {self.seed}: the order "
                f"would change. Create it with seed={base.seed}, or start another run directory"
            )
        self.base, self._resuming = base, (base, dict(reached))
        self.set_epoch(base.epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return what this process has consumed, for a stream that is read without workers."""
        return self.progress(self._readers, {self._reader: (self._finished, self._offset)}).to_tree()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Start the next pass where the state says, on any number of readers."""
        self.resume(ShardProgress.from_tree(state), {})
