"""Samplers of map-style data whose order is the same on every topology."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from resume_adapters.core.dataloader.cursor import Indices, Permutation, SampleCursor
from resume_adapters.errors import StateMismatch

_BLOCKS = (64, 4096)
"""Positions of an order that are computed at once: the first block, and the largest. A small first block yields the
first sample soon; the largest block fits the processor's first cache."""


def _blocks(start: int, stop: int, unit: int) -> Iterator[tuple[int, int]]:
    """Yield growing ranges that cover ``start`` to ``stop``, each but the last a multiple of ``unit``."""
    size, largest = _BLOCKS
    while start < stop:
        end = min(stop, start + max(1, size // unit) * unit)
        yield start, end
        start, size = end, min(2 * size, largest)


class _GlobalOrder:
    """Passes over a global order, of which each rank yields its part.

    Each pass is the next epoch, unless :meth:`set_epoch` has set another.
    """

    def __init__(self, data: Sized | int, seed: int, shuffle: bool, rank: int, world_size: int) -> None:
        self.size = data if isinstance(data, int) else len(data)
        self.seed = seed
        self.shuffle = shuffle
        self.rank = rank
        self.world_size = world_size
        self._start = 0
        self._next_epoch = 0
        # Shared with worker processes: the epoch and start of the running pass, set when it begins.
        self._running = torch.zeros(2, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    @property
    def epoch(self) -> int:
        """The epoch of the running pass, in this process and in its loader's workers."""
        return int(self._running[0])

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass. If that epoch was resumed, the pass continues where it was interrupted."""
        if epoch != self._next_epoch:
            self._next_epoch, self._start = epoch, 0

    def seek(self, cursor: SampleCursor) -> None:
        """Start the next pass at ``cursor``, in constant time.

        Raises:
            StateMismatch: the cursor was saved with a different seed.
        """
        if cursor.seed != self.seed:
            raise StateMismatch(
                f"the position in the data was saved with seed {cursor.seed}, this sampler has {self.seed}: the order "
                f"would change. Create the sampler with seed={cursor.seed}, or start another run directory"
            )
        over = cursor.consumed >= self.size
        self._next_epoch, self._start = cursor.epoch + over, 0 if over else cursor.consumed
        self._running[0], self._running[1] = self._next_epoch, self._start

    def cursor(self, taken: int) -> SampleCursor:
        """Return the position after ``taken`` samples of this pass on each rank."""
        epoch, start = self._running.tolist()
        return SampleCursor(epoch, self.seed, min(self.size, start + taken * self.world_size))

    def state_dict(self) -> dict[str, Any]:
        """Return where the next pass starts."""
        return SampleCursor(self._next_epoch, self.seed, self._start).to_tree()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Start the next pass where the state says."""
        self.seek(SampleCursor(**state))

    def _begin(self) -> tuple[int, int]:
        epoch, start = self._next_epoch, self._start
        self._running[0], self._running[1] = epoch, start
        self._next_epoch, self._start = epoch + 1, 0
        return epoch, start

    def _order(self, epoch: int) -> Callable[[Indices], Indices]:
        """Return the function from positions of an epoch to samples."""
        return Permutation(self.size, self.seed, epoch).at if self.shuffle else lambda positions: positions


class ElasticSampler(_GlobalOrder, Sampler[int]):
    """Samples of a map-style dataset in a shuffled order that is the same on every topology, and takes no memory.

    Under the Trainer and Accelerate leave ``rank`` and ``world_size`` out: they distribute whole batches to the ranks
    themselves. Under Lightning (with ``use_distributed_sampler=False``) and DeepSpeed pass both.

    If the number of samples is not a multiple of ``world_size``, some ranks repeat the first samples of the epoch, so
    that every rank has the same number; at most ``world_size - 1`` samples of an epoch are seen twice.

    Args:
        data: the dataset, or its length.
        seed: seed of the order.
        shuffle: shuffle the samples; otherwise they come in the order of their indices.
        rank: this rank, if the sampler should distribute the samples to the ranks.
        world_size: number of ranks, likewise.
    """

    def __init__(
        self, data: Sized | int, *, seed: int = 0, shuffle: bool = True, rank: int = 0, world_size: int = 1
    ) -> None:
        super().__init__(data, seed, shuffle, rank, world_size)

    def __len__(self) -> int:
        """Return the number of samples of a whole epoch on this rank."""
        return -(-self.size // self.world_size)

    def __iter__(self) -> Iterator[int]:
        epoch, start = self._begin()
        order = self._order(epoch)
        stop = start + -(-(self.size - start) // self.world_size) * self.world_size
        for first, end in _blocks(start, stop, self.world_size):
            positions = np.arange(first + self.rank, end, self.world_size, dtype=np.int64)
            yield from order(positions % max(1, self.size)).tolist()


class ElasticBatchSampler(_GlobalOrder, Sampler[list[int]]):
    """Batches in the order of :class:`ElasticSampler`: a global batch is the batches of all ranks, in rank order.

    The last samples of an epoch are split evenly. If they are fewer than the ranks, the ranks without one repeat the
    first samples of the epoch.

    Args:
        data: the dataset, or its length.
        batch_size: samples in a batch, on each rank.
        seed: seed of the order.
        shuffle: shuffle the samples; otherwise they come in the order of their indices.
        drop_last: leave out the last samples if they do not fill a batch on every rank.
        rank: this rank, if the sampler should distribute the samples to the ranks.
        world_size: number of ranks, likewise.
    """

    def __init__(
        self,
        data: Sized | int,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__(data, seed, shuffle, rank, world_size)
        self.batch_size = batch_size
        self.drop_last = drop_last

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch on this rank."""
        global_batch = self.batch_size * self.world_size
        return self.size // global_batch if self.drop_last else -(-self.size // global_batch)

    def __iter__(self) -> Iterator[list[int]]:
        epoch, start = self._begin()
        order = self._order(epoch)
        global_batch = self.batch_size * self.world_size
        whole = (self.size - start) // global_batch * global_batch + start
        for first, end in _blocks(start, whole, global_batch):
            positions = np.arange(first, end, dtype=np.int64)
            mine = positions.reshape(-1, self.world_size, self.batch_size)[:, self.rank]
            samples = order(mine.ravel()).tolist()
            for begin in range(0, len(samples), self.batch_size):
                yield samples[begin : begin + self.batch_size]
        if whole < self.size and not self.drop_last:
            rest = np.arange(whole, self.size, dtype=np.int64)
            mine = np.array_split(rest, self.world_size)[self.rank]
            yield order(mine if len(mine) else np.array([self.rank % self.size], dtype=np.int64)).tolist()
