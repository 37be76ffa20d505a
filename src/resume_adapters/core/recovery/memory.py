"""What lies in memory for a block: the checkpoint that is written after a failure."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection
from pathlib import Path

from resume_adapters.core.checkpoint.remove import delete_all
from resume_adapters.core.recovery.options import Launch
from resume_adapters.core.recovery.plan import HeldCheckpoint
from resume_adapters.core.storage.base import Storage
from resume_adapters.core.storage.local import make_private_directory

ROOT = Path("/dev/shm")
"""A file system in memory, which Linux has."""


class MemoryDirectory:
    """The directory in memory of one block, alike on all ranks of a node, and after each restart by the launcher.

    Args:
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

    def has(self, held: HeldCheckpoint) -> bool:
        """Return whether a checkpoint is still there."""
        return self._storage.exists(Path(held.path))

    def clear(self, but: Collection[Path] = ()) -> None:
        """Remove what is there. One rank calls it.

        Args:
            but: what stays.
        """
        if not self._storage.exists(self.path):
            return
        for entry in self._storage.entries(self.path):
            if self.path / entry.name not in but:
                delete_all(self._storage, self.path / entry.name, unshared)
        if not but:
            delete_all(self._storage, self.path, unshared)


def unshared() -> None:
    """Nobody else uses the directory."""
