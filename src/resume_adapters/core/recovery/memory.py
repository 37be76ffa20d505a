"""What lies in memory for a block: what each rank keeps of its own, and what is written after a failure."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Collection
from pathlib import Path

import msgspec

from resume_adapters.core.checkpoint.remove import delete_all
from resume_adapters.core.recovery.options import Launch
from resume_adapters.core.recovery.own_state import OwnStates
from resume_adapters.core.recovery.plan import Failure, Level
from resume_adapters.core.storage.base import Storage, write_atomically
from resume_adapters.core.storage.private import make_private_directory

ROOT = Path("/dev/shm")
"""A file system in memory, which Linux has."""


class HeldCheckpoint(msgspec.Struct, frozen=True):
    """A checkpoint in memory from which a run goes on.

    Attributes:
        path: where.
        generation: the start of the run directory that wrote it, or has resumed from it since; it is of no use once
            there is a later one.
    """

    path: str
    generation: int


class Handover(msgspec.Struct, frozen=True):
    """What the processes of a launch leave for those that take their places.

    Attributes:
        level: how these go on.
        failure: what went wrong.
        reason: why not at a cheaper level; empty where they do.
        began: when the failure was seen, by ``time.monotonic``, which all processes of a machine share.
        held: the checkpoints in memory, by run directory.
    """

    level: Level
    failure: Failure
    reason: str
    began: float
    held: dict[str, HeldCheckpoint]


class MemoryDirectory:
    """The directory in memory of one block, alike on all ranks of a node, and after each restart by the launcher.

    Args:
        storage: the file operations.
        launch: the processes of the launch.
        token: distinguishes the launch from all others.
        root: a file system in memory.

    Attributes:
        path: the directory.
    """

    def __init__(self, storage: Storage, launch: Launch, token: str, root: Path = ROOT) -> None:
        digest = hashlib.sha256(f"{token} {launch.name}".encode()).hexdigest()[:16]
        self._storage = storage
        self._launch = launch
        self.path = root / f"resume-adapters-{os.getuid()}-{digest}"

    def make(self) -> None:
        """Make the directory, which no other user can enter. Every rank may call it.

        Raises:
            OSError: it cannot be made, or something else has its name.
        """
        make_private_directory(self.path)

    def of_attempt(self, number: int) -> Path:
        """Return where the checkpoint is written that an attempt goes on from."""
        return self.path / f"{self._launch.start}.{number}"

    def own_states(self, number: int) -> OwnStates:
        """Return what the ranks keep of their own in an attempt."""
        directory = self._own(number)
        with contextlib.suppress(OSError):  # then nothing can be written there either, and that is said
            self.make()
            self._storage.make_directory(directory)
        return OwnStates(self._storage, directory, self._launch.rank)

    def _own(self, number: int) -> Path:
        return self.path / f"own-{self._launch.start}.{number}"

    # ---- From the processes of one start to those of the next

    @property
    def _handover(self) -> Path:
        return self.path / "handover.json"

    def hand_over(self, handover: Handover) -> None:
        """Leave word for the processes that take the places of these. One rank calls it, last of all."""
        self.make()
        write_atomically(self._storage, self._handover, msgspec.json.encode(handover))

    def handed_over(self) -> Handover | None:
        """Return what the processes before these have left; ``None`` where they left nothing."""
        if not self._storage.is_file(self._handover):
            return None
        return msgspec.json.decode(self._storage.read(self._handover), type=Handover)

    def has(self, held: Collection[HeldCheckpoint]) -> bool:
        """Return whether there are checkpoints, and all of them are still there."""
        return bool(held) and all(self._storage.exists(Path(each.path)) for each in held)

    # ---- Removing

    def forget(self, number: int) -> None:
        """Remove all but what an attempt needs that is under way. One rank calls it."""
        self.clear(but=[self._own(number)])

    def clear(self, but: Collection[Path] = ()) -> None:
        """Remove what is there. One rank calls it.

        Args:
            but: what stays.
        """
        if not self._storage.exists(self.path):
            return
        for entry in self._storage.entries(self.path):
            if self.path / entry.name not in but:
                delete_all(self._storage, self.path / entry.name, _unshared)
        if not but:
            delete_all(self._storage, self.path, _unshared)


def _unshared() -> None:
    """Nobody else uses the directory."""
