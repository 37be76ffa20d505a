"""Samplers of map-style data in an order that is the same on every topology."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from resume_adapters.core.dataloader.cursor import Indices, Permutation, SampleCursor
from resume_adapters.errors import StateMismatch

_BLOCKS = (64, 4096)
"""Positions of an order that are computed at a time, at first and in the long run: the first sample comes soon, and the
later ones cheaply, from the processor's first cache."""


def _blocks(start: int, stop: int, unit: int) -> Iterator[tuple[int, int]]:
    """Yield growing ranges that cover ``start`` to ``stop``, each but the last a multiple of ``unit``."""
    size, largest = _BLOCKS
    while start < stop:
        end = min(stop, start + max(1, size // unit) * unit)
        yield start, end
        start, size = end, min(2 * size, largest)


class _GlobalOrder:
    """One pass after another over a global order, of which each rank takes its share.

    Each pass is of the next epoch, unless :meth:`set_epoch` says which.
    """

    def __init__(self, data: Sized | int, seed: int, shuffle: bool, rank: int, world_size: int) -> None:
        self.size = data if isinstance(data, int) else len(data)
        self.seed = seed
        self.shuffle = shuffle
        self.rank = rank
        self.world_size = world_size
        self._start = 0
        self._next_epoch = 0
        # Shared with worker processes: the epoch of the pass that is under way, set when it begins.
        self._running = torch.zeros(2, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    @property
    def epoch(self) -> int:
        """The epoch of the pass that is under way, in this process and in its loader's workers."""
        return int(self._running[0])

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be of this epoch; where it is the epoch that was resumed, go on within it."""
        if epoch != self._next_epoch:
            self._next_epoch, self._start = epoch, 0

    def seek(self, cursor: SampleCursor) -> None:
        """Let the next pass begin where ``cursor`` says, in constant time.

        Raises:
            StateMismatch: it was made with another seed.
        """
        if cursor.seed != self.seed:
            raise StateMismatch(
                f"the position in the data was saved with seed {cursor.seed}, this sampler has {self.seed}: another "
                f"order would follow. Make it with seed={cursor.seed}, or start another run directory"
            )
        over = cursor.consumed >= self.size
        self._next_epoch, self._start = cursor.epoch + over, 0 if over else cursor.consumed
        self._running[0], self._running[1] = self._next_epoch, self._start

    def cursor(self, taken: int) -> SampleCursor:
        """Return the position after ``taken`` samples of this pass on each rank."""
        epoch, start = self._running.tolist()
        return SampleCursor(epoch, self.seed, min(self.size, start + taken * self.world_size))

    def state_dict(self) -> dict[str, Any]:
        """Return where the next pass begins."""
        return SampleCursor(self._next_epoch, self.seed, self._start).to_tree()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass begin where the state says."""
        self.seek(SampleCursor(**state))

    def _begin(self) -> tuple[int, int]:
        epoch, start = self._next_epoch, self._start
        self._running[0], self._running[1] = epoch, start
        self._next_epoch, self._start = epoch + 1, 0
        return epoch, start

    def _order(self, epoch: int) -> Callable[[Indices], Indices]:
        """Return what finds the samples at positions of an epoch."""
        return Permutation(self.size, self.seed, epoch).at if self.shuffle else lambda positions: positions


class ElasticSampler(_GlobalOrder, Sampler[int]):
    """Samples of a map-style dataset in a shuffled order that is computed, not held, and the same on every topology.

    Under the Trainer and Accelerate leave ``rank`` and ``world_size`` out: they deal whole batches to the ranks
    themselves. Under Lightning (with ``use_distributed_sampler=False``) and DeepSpeed pass both.

    Where the samples do not go round evenly, the ranks that would come short take the first ones of the epoch again, so
    that every rank has as many; at most ``world_size - 1`` samples of an epoch are seen twice.

    Args:
        data: the dataset, or its length.
        seed: seed of the order.
        shuffle: without, samples come as they are numbered.
        rank: this rank, where the sampler is to deal the samples out.
        world_size: number of ranks, likewise.
    """

    def __init__(
        self, data: Sized | int, *, seed: int = 0, shuffle: bool = True, rank: int = 0, world_size: int = 1
    ) -> None:
        super().__init__(data, seed, shuffle, rank, world_size)

    def __len__(self) -> int:
        """Return the samples of a whole epoch on this rank."""
        return -(-self.size // self.world_size)

    def __iter__(self) -> Iterator[int]:
        epoch, start = self._begin()
        order = self._order(epoch)
        stop = start + -(-(self.size - start) // self.world_size) * self.world_size
        for first, end in _blocks(start, stop, self.world_size):
            positions = np.arange(first + self.rank, end, self.world_size, dtype=np.int64)
            yield from order(positions % max(1, self.size)).tolist()


class ElasticBatchSampler(_GlobalOrder, Sampler[list[int]]):
    """Batches in the order of :class:`ElasticSampler`, each rank's samples beside those of the next rank.

    The last samples of an epoch are split evenly; where fewer are left than there are ranks, the ranks that would have
    none take the first ones of the epoch again.

    Args:
        data: the dataset, or its length.
        batch_size: samples in a batch, on each rank.
        seed: seed of the order.
        shuffle: without, samples come as they are numbered.
        drop_last: leave out what does not fill a batch on every rank.
        rank: this rank, where the sampler is to deal the samples out.
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
        """Return the batches of a whole epoch on this rank."""
        whole = self.batch_size * self.world_size
        return self.size // whole if self.drop_last else -(-self.size // whole)

    def __iter__(self) -> Iterator[list[int]]:
        epoch, start = self._begin()
        order = self._order(epoch)
        together = self.batch_size * self.world_size
        whole = (self.size - start) // together * together + start
        for first, end in _blocks(start, whole, together):
            positions = np.arange(first, end, dtype=np.int64)
            mine = positions.reshape(-1, self.world_size, self.batch_size)[:, self.rank]
            samples = order(mine.ravel()).tolist()
            for begin in range(0, len(samples), self.batch_size):
                yield samples[begin : begin + self.batch_size]
        if whole < self.size and not self.drop_last:
            rest = np.arange(whole, self.size, dtype=np.int64)
            mine = np.array_split(rest, self.world_size)[self.rank]
            yield order(mine if len(mine) else np.array([self.rank % self.size], dtype=np.int64)).tolist()
