"""The life of a checkpoint from pending to committed. This module is the only writer of the commit marker.

A pending checkpoint is a directory that has ``resume/`` but no ``resume/manifest.json``. The manifest, written last and
renamed into place, is the commit: before it the checkpoint does not exist, after it the checkpoint is whole, for all
its files were forced onto the disk first.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from resume_adapters.core import manifest as manifests
from resume_adapters.core.manifest import FileEntry, Manifest
from resume_adapters.core.ranks import Ranks, everywhere
from resume_adapters.core.state import DIRECTORY
from resume_adapters.core.storage import Storage, point_to, remove_tree, write_atomically
from resume_adapters.errors import ResumeError, SaveFailed

T = TypeVar("T")

CONTROL = ".resume"
"""Where a run directory keeps what belongs to the run rather than to one checkpoint."""

LATEST = "latest"
SUPERSEDED = ".superseded"
"""Suffix of a committed checkpoint whose step is being saved again: it stays valid until the new one is committed."""


def marker(checkpoint: Path) -> Path:
    """Return the file whose presence makes ``checkpoint`` committed."""
    return checkpoint / DIRECTORY / "manifest.json"


def is_committed(checkpoint: Path) -> bool:
    """Return whether the checkpoint has its commit marker. Whether its files agree with it is another question."""
    return marker(checkpoint).is_file()


def is_pending(checkpoint: Path) -> bool:
    """Return whether the checkpoint was begun by this package and never committed."""
    return (checkpoint / DIRECTORY).is_dir() and not is_committed(checkpoint)


class PendingCheckpoint:
    """A checkpoint that is being written.

    Args:
        storage: where to write.
        ranks: the ranks that write it together; with a background commit, a channel of its own.
        path: the checkpoint's directory; its parent is the run directory.
        step: optimizer steps completed.
    """

    def __init__(self, storage: Storage, ranks: Ranks, path: Path, step: int) -> None:
        self.storage = storage
        self.ranks = ranks
        self.path = path
        self.step = step

    @property
    def directory(self) -> Path:
        """Where the parts that this package adds go."""
        return self.path / DIRECTORY

    def open(self, set_aside: Callable[[Path], object], fence: Callable[[], None]) -> None:
        """Make the pending directory appear, marked as such from its first instant. Every rank calls it.

        Args:
            set_aside: moves a checkpoint out of the way.
            fence: raises where another start owns the run directory.
        """
        self._together(lambda: self._make_directory(set_aside, fence) if self.ranks.rank == 0 else None, "begin")

    def _make_directory(self, set_aside: Callable[[Path], object], fence: Callable[[], None]) -> None:
        """Put an empty pending directory in place.

        A committed checkpoint of the same name steps aside but stays valid; a foreign one is set aside; a pending one
        is what a crash left and goes.
        """
        fence()
        if is_committed(self.path):
            older = self.path.with_name(self.path.name + SUPERSEDED)
            if older.exists():
                set_aside(older)
            self.storage.replace(self.path, older)
        elif is_pending(self.path):
            remove_tree(self.storage, self.path)
        elif self.path.exists() or self.path.is_symlink():
            set_aside(self.path)
        new = self.path.parent / CONTROL / f"begin-{self.path.name}"
        self.storage.make_directory(new / DIRECTORY)
        self.storage.replace(new, self.path)

    def write(self, work: Callable[[], T]) -> list[T]:
        """Let every rank write files and return what ``work`` returned on each; where one fails, all raise.

        Raises:
            SaveFailed: this rank could not write.
            PeerFailed: another rank could not.
        """
        try:
            return self._together(work, "write")
        except ResumeError:
            if self.ranks.rank == 0:
                self._abandon()
            raise

    def seal(self, files: Iterable[Path]) -> list[FileEntry]:
        """Force this rank's files onto the disk and return their entries."""
        entries = []
        directories = {self.directory, self.path}
        for file in files:
            self.storage.sync(file)
            size, digest = self.storage.digest(file)
            relative = file.relative_to(self.path)
            entries.append(FileEntry(relative.as_posix(), size, digest, self.ranks.rank))
            directories.update(self.path / parent for parent in relative.parents)
        for directory in sorted(directories):
            self.storage.sync(directory)
        return entries

    def commit(
        self,
        files: Iterable[Path],
        describe: Callable[[tuple[FileEntry, ...]], Manifest],
        fence: Callable[[], None],
    ) -> Manifest:
        """Commit on all ranks or on none, and point ``latest`` at it.

        Args:
            files: this rank's files.
            describe: makes the manifest from all ranks' entries; called on rank zero.
            fence: raises where another start owns the run directory; called on rank zero.

        Raises:
            SaveFailed: this rank could not write, or rank zero could not commit.
            PeerFailed: another rank could not.
        """
        entries = self._together(lambda: self.seal(files), "force onto the disk")
        everything = tuple(entry for of_rank in entries for entry in of_rank)
        manifest = self._together(lambda: self._mark(everything, describe, fence), "commit")[0]
        assert manifest is not None, "rank zero commits"
        return manifest

    def _mark(
        self,
        entries: tuple[FileEntry, ...],
        describe: Callable[[tuple[FileEntry, ...]], Manifest],
        fence: Callable[[], None],
    ) -> Manifest | None:
        if self.ranks.rank != 0:
            return None
        manifest = describe(entries)
        fence()
        self.storage.sync(self.path.parent)
        write_atomically(self.storage, marker(self.path), manifests.encode(manifest))
        point_to(self.storage, self.path.parent / LATEST, self.path.name)
        return manifest

    def _together(self, work: Callable[[], T], doing: str) -> list[T]:
        return everywhere(self.ranks, work, f"{doing} {self.path.name}", functools.partial(self._failed, doing=doing))

    def _failed(self, cause: Exception, doing: str) -> SaveFailed:
        return SaveFailed(
            f"rank {self.ranks.rank} could not {doing} {self.path.name}: {cause}. It is not committed; the checkpoints "
            "committed before it are intact. Free space or mend permissions, then launch the same command again",
            path=self.path,
            step=self.step,
        )

    def _abandon(self) -> None:
        """Remove what a failed save wrote, where that is possible: it is not committed, so nothing is lost."""
        with contextlib.suppress(OSError):
            remove_tree(self.storage, self.path)
