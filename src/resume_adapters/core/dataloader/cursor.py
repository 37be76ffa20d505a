"""Where in the data a run is, as data, whatever the number of ranks and workers. Pure.

Map-style data have one global order per epoch, computed from a seed: :class:`Order`. How far a run is in it is one
number, the samples that all ranks together have consumed: :class:`Cursor`. Streams are made of shards: how far a run is
in each of them is :class:`ShardProgress`, merged from all ranks and workers, and what is left is dealt out again.

A sample is consumed when the optimizer step that used it is complete. A worker that has fetched it does not count.
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
"""Samples that an order may have: each half of a position must fit into 31 bits."""


class Permutation:
    """A permutation of ``range(size)`` that is computed where it is asked for, not held.

    A generalised Feistel network (Black and Rogaway, *Ciphers with arbitrary finite domains*, 2002): a position is
    written as two digits, each of which is shifted in turn by a hash of the other. What falls outside of the range is
    permuted again until it falls inside.

    Args:
        size: number of samples, under 2**62.
        seed: seed of the run.
        epoch: each epoch has an order of its own.
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
    np.subtract(digit, np.uint32(base), out=digit, where=digit >= np.uint32(base))


@dataclass(frozen=True)
class SampleCursor:
    """How far a run is in map-style data.

    Attributes:
        epoch: the epoch that is under way.
        seed: seed of the order.
        consumed: samples of the epoch that all ranks together have consumed, in the epoch's order.
    """

    epoch: int
    seed: int
    consumed: int = 0

    def to_tree(self) -> dict[str, Any]:
        """Return the cursor as data."""
        return asdict(self)


def steps_done(epoch: int, consumed: int, length: int, accumulation: int, *, carried: bool) -> int:
    """Return the optimizer steps after which a run has come to a batch of an epoch.

    Args:
        epoch: epochs before it.
        consumed: batches of it that are done.
        length: batches in an epoch.
        accumulation: batches in an optimizer step.
        carried: an accumulation goes on from one epoch into the next; else the last step of one may have fewer.
    """
    if carried:
        return (epoch * length + consumed) // accumulation
    whole = -(-length // accumulation)
    return epoch * whole + (whole if consumed == length else consumed // accumulation)


@dataclass(frozen=True)
class ShardProgress:
    """How far a run is in a sharded stream, in one epoch.

    Attributes:
        epoch: the epoch that is under way.
        seed: seed of the order of the shards.
        offsets: records consumed of each shard that was begun, by the shard's index.
        finished: the shards of which every record is consumed.
    """

    epoch: int
    seed: int
    offsets: Mapping[int, int]
    finished: frozenset[int]

    @staticmethod
    def start(epoch: int, seed: int) -> ShardProgress:
        """Return the progress of an epoch of which nothing is consumed."""
        return ShardProgress(epoch, seed, {}, frozenset())

    def to_tree(self) -> dict[str, Any]:
        """Return the progress as data."""
        offsets = [[shard, offset] for shard, offset in sorted(self.offsets.items())]
        return {"epoch": self.epoch, "seed": self.seed, "offsets": offsets, "finished": sorted(self.finished)}

    @staticmethod
    def from_tree(tree: Mapping[str, Any]) -> ShardProgress:
        """Return the progress that :meth:`to_tree` described."""
        offsets = {int(shard): int(offset) for shard, offset in tree["offsets"]}
        return ShardProgress(tree["epoch"], tree["seed"], offsets, frozenset(tree["finished"]))


def merge(parts: Iterable[ShardProgress]) -> ShardProgress:
    """Return what all ranks and workers together have consumed.

    Each shard is read by one worker at a time, so the furthest that anyone says of a shard is how far it is.

    Raises:
        ValueError: they are of different epochs or seeds.
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
"""How far a reader is: the shards of its share that it has finished, and the records of the next that are consumed."""

Share = list[tuple[int, int]]
"""What one reader reads: shards in order, each with the records of it to pass over."""


def assign_shards(shards: int, progress: ShardProgress, readers: int, *, shuffle: bool = True) -> list[Share]:
    """Deal the shards that are left out to readers: every record that is left goes to exactly one of them.

    Shards that were begun come first, so that few are open at any time. The others follow in the epoch's order.

    Args:
        shards: number of shards.
        progress: what is consumed.
        readers: ranks times workers.
        shuffle: take the shards in an order of the epoch's own rather than as they are numbered.
    """
    positions = np.arange(shards, dtype=np.int64)
    order = Permutation(shards, progress.seed, progress.epoch).at(positions) if shuffle else positions
    left = [(shard, progress.offsets.get(shard, 0)) for shard in order.tolist() if shard not in progress.finished]
    left.sort(key=lambda each: each[1] == 0)
    return [left[reader::readers] for reader in range(readers)]


def advance(progress: ShardProgress, share: Share, finished: int, offset: int) -> ShardProgress:
    """Return the progress of one reader of :func:`deal`.

    Args:
        progress: what was consumed when the shards were dealt.
        share: what the reader was dealt.
        finished: how many shards of it the reader has finished.
        offset: records consumed of the next one, with those that it passed over.
    """
    offsets = {share[finished][0]: offset} if offset else {}
    return ShardProgress(progress.epoch, progress.seed, offsets, frozenset(shard for shard, _ in share[:finished]))
