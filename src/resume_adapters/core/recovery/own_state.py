"""What a rank alone knows, kept outside of its process: random state, positions, counters, buffers.

Weights and optimizer are alike on all ranks, so the others have them where one dies. What is a rank's own dies with it,
so it is written to memory at the end of each step, in place: a few kilobytes, and nothing waits for it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import xxhash

from resume_adapters.core.state.comparison import bits
from resume_adapters.core.state.packed import Packer, unpack
from resume_adapters.core.storage.base import Storage
from resume_adapters.errors import NotSerialisable

_SLOTS = 3
"""Steps that are there: a rank that dies may have come a step further than the others, and was writing the next."""

_FRAME = struct.Struct("<QQQQ")
"""The count of the record, its length, that of its head, and the digest of both."""


class StepPlace(msgspec.Struct, frozen=True):
    """Of which moment of which training a state is.

    Attributes:
        directory: the run directory.
        step: optimizer steps completed.
        place: where in the training, of several places within one step.
    """

    directory: str
    step: int
    place: str


class _Head(msgspec.Struct, frozen=True):
    moment: StepPlace
    digests: list[str]


class _Record(NamedTuple):
    number: int
    head: _Head
    packed: bytes


class OwnStates:
    """What each rank of an attempt keeps outside of its process. All ranks see the directory.

    Args:
        storage: the file operations.
        directory: where; it belongs to one attempt.
        rank: this rank.

    Attributes:
        problem: why this rank keeps nothing; empty where it does.
    """

    def __init__(self, storage: Storage, directory: Path, rank: int) -> None:
        self.problem = ""
        self._storage = storage
        self._directory = directory
        self._rank = rank
        self._count = 0
        self._packer = Packer()
        self._writers: list[Callable[[bytes], None]] = []
        self._large: list[Any] = []
        self._digests: list[str] = []

    def stop(self, problem: str) -> None:
        """Keep nothing more: it would be of no use, for the given reason."""
        self.problem = problem

    def keep_launch(self, tree: Any) -> None:
        """Keep what this rank was launched with, once: see :meth:`keep`."""
        if self._is_off():
            return
        try:
            self._storage.write(self._launch(self._rank), Packer().pack(tree)[0])
        except (OSError, NotSerialisable) as error:
            self.problem = f"{type(error).__name__}: {error}"

    def keep(self, moment: StepPlace, tree: Any) -> None:
        """Keep this rank's own state of now. Where that fails, nothing more is kept, and the training goes on.

        Tensors that are too large for it are left out. They may be taken from another rank if they were alike on all
        ranks when they were last looked at, as an average of weights is: at the first steps, and ever more seldom.

        Args:
            moment: of which moment it is.
            tree: the state, as data.
        """
        if self._is_off():
            return
        try:
            packed, self._large = self._packer.pack(tree)
            if len(self._large) != len(self._digests) or self._count & (self._count - 1) == 0:
                self._digests = [xxhash.xxh3_128_hexdigest(bits(each).numpy().data) for each in self._large]
            head = msgspec.json.encode(_Head(moment, self._digests))
            digest = xxhash.xxh3_64_intdigest(head + packed)
            frame = _FRAME.pack(self._count, len(packed), len(head), digest)
            if len(self._writers) <= self._count % _SLOTS:
                self._writers.append(self._storage.rewriting(self._slot(self._rank, self._count)))
            self._writers[self._count % _SLOTS](b"".join((frame, head, packed)))
        except (OSError, NotSerialisable) as error:
            self.problem = f"{type(error).__name__}: {error}"
        self._count += 1

    def newest(self, rank: int) -> StepPlace | None:
        """Return the last moment of which a rank has kept its state; ``None``: of none."""
        found = self._records(rank)
        return found[0].head.moment if found else None

    def find(self, rank: int, moment: StepPlace) -> tuple[Any, str]:
        """Return what a rank has kept of a moment and of its launch, and why it cannot be used; empty where it can.

        This rank holds its own state of that moment.
        """
        if self.problem:
            return None, f"what it knew alone is not kept: {self.problem}"
        found = next((each for each in self._records(rank) if each.head.moment == moment), None)
        if found is None:
            return None, "what it knew alone was not kept at that step"
        if found.head.digests != self._digests:
            return None, "a part of what it knew alone is too large to keep it at each step"
        launch = unpack(self._storage.read(self._launch(rank)), ())
        return (unpack(found.packed, self._large), launch), ""

    def _is_off(self) -> bool:
        if not self.problem and _uses_accelerator():
            self.problem = "the training uses a device, of which a process that is forked cannot take care"
        return bool(self.problem)

    def _launch(self, rank: int) -> Path:
        return self._directory / f"{rank}.launch"

    def _slot(self, rank: int, number: int) -> Path:
        return self._directory / f"{rank}.{number}"

    def _records(self, rank: int) -> Sequence[_Record]:
        """Return what is whole of what a rank has written, the newest first."""
        found = []
        for number in range(_SLOTS):
            slot = self._slot(rank, number)
            if self._storage.is_file(slot):
                record = _read(self._storage.read(slot))
                found += [record] if record is not None else []
        return sorted(found, key=lambda each: each.number, reverse=True)


def _read(content: bytes) -> _Record | None:
    """Return a record; ``None`` where its rank has died while it wrote."""
    if len(content) < _FRAME.size:
        return None
    count, length, of_head, digest = _FRAME.unpack_from(content)
    whole = content[_FRAME.size : _FRAME.size + of_head + length]
    if xxhash.xxh3_64_intdigest(whole) != digest:
        return None
    return _Record(count, msgspec.json.decode(whole[:of_head], type=_Head), whole[of_head:])


def _uses_accelerator() -> bool:
    """Return whether this process uses a device."""
    import torch

    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
