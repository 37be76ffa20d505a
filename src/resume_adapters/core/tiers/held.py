"""The committed checkpoints of a directory of this node, other than the run directory, as a source for a resume."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from resume_adapters.core.checkpoint import layout
from resume_adapters.core.checkpoint.catalog import Catalog
from resume_adapters.core.checkpoint.commit import PendingCheckpoint
from resume_adapters.core.checkpoint.layout import CONTROL
from resume_adapters.core.checkpoint.manifest import FileEntry
from resume_adapters.core.checkpoint.remove import Fence, delete
from resume_adapters.core.checkpoint.validity import read_manifest
from resume_adapters.core.log import logger
from resume_adapters.core.ranks import Ranks
from resume_adapters.core.run_directory.control import Leftovers
from resume_adapters.core.run_directory.journal import Journal
from resume_adapters.core.run_directory.upkeep import sweep
from resume_adapters.core.storage.base import Storage, read_pieces
from resume_adapters.core.storage.groups import StorageGroup
from resume_adapters.core.tiers.tier import TierCheckpoint
from resume_adapters.errors import CheckpointDamaged, FormatTooNew


class HeldCheckpoints:
    """A :class:`~resume_adapters.core.tiers.tier.Tier` in a directory of this node.

    Args:
        storage: the file operations.
        directory: where the checkpoints are.
        fence: raises if a later start owns the run.
        clock: returns seconds since 1970.
    """

    def __init__(self, storage: Storage, directory: Path, fence: Fence, clock: Callable[[], float]) -> None:
        self.directory = directory
        self._storage = storage
        self._fence = fence
        self._clock = clock
        self._catalog = Catalog(storage, directory)
        self._unreadable: frozenset[str] = frozenset()

    @property
    def label(self) -> str:
        return str(self.directory)

    def names(self) -> list[str]:
        """Return the names of the checkpoints that are there."""
        return self._catalog.committed()

    def checkpoints(self) -> list[TierCheckpoint]:
        found, unreadable = [], set()
        for name in self.names():
            try:
                found.append(TierCheckpoint(name, name, read_manifest(self._storage, self.directory / name)))
            except (CheckpointDamaged, FormatTooNew) as error:
                logger.warning("%s/%s is not used: %s", self.label, name, error)
                unreadable.add(name)
        self._unreadable = frozenset(unreadable)
        return sorted(found, key=lambda each: each.identity, reverse=True)

    @property
    def unreadable(self) -> list[str]:
        return sorted(self._unreadable)

    def read(self, found: TierCheckpoint, entry: FileEntry) -> Iterator[bytes]:
        file = layout.locate(self._storage, self.directory / found.name, entry.path)
        size = self._storage.size(file) if self._storage.is_file(file) else None
        if size != entry.bytes:
            has = "is missing" if size is None else f"has {size} bytes, its manifest says {entry.bytes}"
            raise CheckpointDamaged(f"{file} {has}", path=file, step=found.manifest.step)
        return read_pieces(self._storage, file)

    def sweep(self) -> None:
        """Remove what crashed copies have left."""
        journal = Journal(self._storage, self.directory / CONTROL, self._clock)
        sweep(self._storage, self._catalog, Leftovers(), journal, self._fence)

    def keep_newest(self) -> TierCheckpoint | None:
        """Remove all but the newest checkpoint, and return that; ``None`` if there is none."""
        found = self.checkpoints()
        for name in (*(each.name for each in found[1:]), *self.unreadable):
            self._remove(name)
        return found[0] if found else None

    def set_aside(self, after: int, before: int = 0) -> None:
        """Remove them: nobody else has them, and all are older than a start that has not looked at them."""
        found = self.checkpoints()
        for name in (*(each.name for each in found if each.manifest.step > after), *self.unreadable):
            self._remove(name)

    def _remove(self, name: str) -> None:
        delete(self._storage, self.directory / name, self._fence)

    def pending(
        self, ranks: Ranks, name: str, step: int, *, is_file: bool, group: StorageGroup | None = None
    ) -> PendingCheckpoint:
        """Return a checkpoint that is to be written here.

        Args:
            ranks: those that write it.
            name: its name.
            step: optimizer steps completed.
            is_file: the framework writes one file of that name, not a directory.
            group: those of the ranks that share the directory; all by default.
        """
        return PendingCheckpoint(
            self._storage,
            ranks,
            self.directory / name,
            step,
            self._fence,
            lambda path: delete(self._storage, path, self._fence),
            is_file=is_file,
            storage_group=group,
        )
