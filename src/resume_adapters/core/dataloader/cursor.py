"""Positions in data that do not depend on the number of ranks and workers. Pure.

Map-style data have one global order per epoch, computed from a seed: :class:`Permutation`. The position in it is one
number, the samples that all ranks have consumed: :class:`SampleCursor`. Streams are made of shards: the position in
each of them is :class:`ShardProgress`, merged from all ranks and workers; what is left is assigned to readers again.

A sample is consumed when the optimizer step that used it is complete. A sample that a worker has fetched is not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]

_ROUNDS = 3
"""Rounds over both digits: six in Luby and Rackoff's count, of which four suffice where the hash is ideal."""

_LIMIT = 1 << 62
"""Most samples of an order: each half of a position must fit into 31 bits."""


class Permutation:
    """A permutation of ``range(size)`` that is computed on demand, in constant memory.

    A generalised Feistel network (Black and Rogaway, *Ciphers with arbitrary finite domains*, 2002): a position is
    written as two digits, each of which is shifted in turn by a hash of the other. A result outside of the range is
    permuted again until it is inside.

    Args:
        size: number of samples, under 2**62.
        epoch: each epoch has its own order.
    """

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        assert 0 <= size < _LIMIT, f"{size} samples"
        self.size = size
        self._left = max(1, math.isqrt(size))
        self._right = max(1, -(-size // self._left))
        self._keys = np.random.SeedSequence([seed, epoch]).generate_state(2 * _ROUNDS, np.uint32)

    def at(self, positions: Indices) -> Indices:
        """Return the sample at each position."""
        samples = self._permute(positions)
        outside = np.flatnonzero(samples >= self.size)
        while len(outside):
            samples[outside] = self._permute(samples[outside])
            outside = outside[samples[outside] >= self.size]
        return samples

    def _permute(self, positions: Indices) -> Indices:
        quotients = positions // self._right
        left = quotients.astype(np.uint32)
        right = (positions - quotients * self._right).astype(np.uint32)
        for key, other in zip(self._keys[::2], self._keys[1::2], strict=True):
            _shift(left, right, key, self._left)
            _shift(right, left, other, self._right)
        return left.astype(np.int64) * self._right + right


def _shift(digit: npt.NDArray[np.uint32], by: npt.NDArray[np.uint32], key: np.uint32, base: int) -> None:
    """Add a hash of ``by`` to ``digit``, modulo ``base``, in place."""
    hashed = by ^ key
    # The finalizer of a 32 bit hash with low bias (Wellons, hash-prospector).
    hashed *= np.uint32(0x7FEB352D)
    hashed ^= hashed >> np.uint32(15)
    hashed *= np.uint32(0x846CA68B)
    hashed ^= hashed >> np.uint32(16)
    digit += ((hashed.astype(np.uint64) * np.uint64(base)) >> np.uint64(32)).astype(np.uint32)
    np.minimum(digit, digit - np.uint32(base), out=digit)  # below the base, the difference is a huge number


@dataclass(frozen=True)
class SampleCursor:
    """The position in map-style data.

    Attributes:
        epoch: the current epoch.
        seed: seed of the order.
        consumed: samples of the epoch that all ranks have consumed, in the epoch's order.
    """

    epoch: int
    seed: int
    consumed: int = 0

    def to_tree(self) -> dict[str, Any]:
        """Return the cursor as data."""
        return asdict(self)


def steps_done(epoch: int, consumed: int, length: int, accumulation: int, *, carried: bool) -> int:
    """Return the optimizer steps completed at a position in the batches of an epoch.

    Args:
        consumed: batches consumed of the current epoch.
        length: batches in an epoch.
        accumulation: batches in an optimizer step.
        carried: an accumulation continues into the next epoch; else the last step of an epoch may have fewer batches.
    """
    if carried:
        return (epoch * length + consumed) // accumulation
    whole = -(-length // accumulation)
    return epoch * whole + (whole if consumed == length else consumed // accumulation)


@dataclass(frozen=True)
class ShardProgress:
    """The position in a sharded stream, in one epoch.

    Attributes:
        epoch: the current epoch.
        seed: seed of the order of the shards.
        offsets: records consumed of each shard that was begun, by the shard's index.
        finished: the shards whose records are all consumed.
    """

    epoch: int
    seed: int
    offsets: Mapping[int, int]
    finished: frozenset[int]

    @staticmethod
    def start(epoch: int, seed: int) -> ShardProgress:
        """Return the progress at the start of an epoch."""
        return ShardProgress(epoch, seed, {}, frozenset())

    def to_tree(self) -> dict[str, Any]:
        """Return the progress as data."""
        offsets = [[shard, offset] for shard, offset in sorted(self.offsets.items())]
        return {"epoch": self.epoch, "seed": self.seed, "offsets": offsets, "finished": sorted(self.finished)}

    @staticmethod
    def from_tree(tree: Mapping[str, Any]) -> ShardProgress:
        """Return the progress that :meth:`to_tree` returned as data."""
        offsets = {int(shard): int(offset) for shard, offset in tree["offsets"]}
        return ShardProgress(tree["epoch"], tree["seed"], offsets, frozenset(tree["finished"]))


def merge(parts: Iterable[ShardProgress]) -> ShardProgress:
    """Merge the progress of all ranks and workers.

    Each shard is read by one worker at a time, so the largest offset of a shard is the current one.

    Raises:
        ValueError: the epochs or the seeds differ.
    """
    known = list(parts)
    if len({(part.epoch, part.seed) for part in known}) != 1:
        raise ValueError(f"expected progress of one epoch, found {[(part.epoch, part.seed) for part in known]}")
    finished = frozenset[int]().union(*(part.finished for part in known))
    offsets: dict[int, int] = {}
    for part in known:
        for shard, offset in part.offsets.items():
            if shard not in finished:
                offsets[shard] = max(offset, offsets.get(shard, 0))
    return ShardProgress(known[0].epoch, known[0].seed, offsets, finished)


ReaderProgress = tuple[int, int]
"""How far a reader is: the shards of its share that it has finished, and the records consumed of the next one."""

Share = list[tuple[int, int]]
"""What one reader reads: shards in order, each with the number of its records to skip."""


def assign_shards(shards: int, progress: ShardProgress, readers: int, *, shuffle: bool = True) -> list[Share]:
    """Assign the shards that are left to readers: every record that is left goes to exactly one reader.

    Shards that were begun come first, so that few are open at any time. The others follow in the epoch's order.

    Args:
        shards: number of shards.
        readers: ranks times workers.
        shuffle: order the shards by the seed and the epoch, not by number.
    """
    positions = np.arange(shards, dtype=np.int64)
    order = Permutation(shards, progress.seed, progress.epoch).at(positions) if shuffle else positions
    left = [(shard, progress.offsets.get(shard, 0)) for shard in order.tolist() if shard not in progress.finished]
    left.sort(key=lambda each: each[1] == 0)
    return [left[reader::readers] for reader in range(readers)]


def advance(progress: ShardProgress, share: Share, finished: int, offset: int) -> ShardProgress:
    """Return the progress of one reader of :func:`assign_shards`.

    Args:
        progress: what was consumed when the shards were assigned.
        share: the shards of the reader.
        finished: how many of them the reader has finished.
        offset: records consumed of the next one, skipped records included.
    """
    offsets = {share[finished][0]: offset} if offset else {}
    return ShardProgress(progress.epoch, progress.seed, offsets, frozenset(shard for shard, _ in share[:finished]))
