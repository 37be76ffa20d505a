"""The life of a checkpoint from pending to committed. This module is the only writer of the commit marker.

A pending checkpoint is a directory that has ``resume/pending`` but no ``resume/manifest.json``. The manifest, written
last and renamed into place, is the commit: before it the checkpoint does not exist, after it the checkpoint is whole,
for all its files were forced onto the disk first. What has neither was not begun here, or has lost its manifest.
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
from resume_adapters.core.state import DIRECTORY, rank_file
from resume_adapters.core.storage import Storage, point_to, remove_tree, write_atomically
from resume_adapters.errors import FencedOff, ResumeError, SaveFailed

T = TypeVar("T")

CONTROL = ".resume"
"""Where a run directory keeps what belongs to the run rather than to one checkpoint."""

LATEST = "latest"
PENDING = "pending"
"""Name of the file that says that a checkpoint was begun by this package and is not committed yet. A directory without
it is never removed as unfinished: ``resume/`` alone may be anybody's."""

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
    return (checkpoint / DIRECTORY / PENDING).is_file() and not is_committed(checkpoint)


def has_lost_manifest(checkpoint: Path) -> bool:
    """Return whether the checkpoint holds what this package saves, and neither marker: it was committed once."""
    own = (checkpoint / DIRECTORY / f"{rank_file('', 0)}.json").is_file()
    return own and not is_committed(checkpoint) and not is_pending(checkpoint)


def superseded(checkpoint: Path) -> Path:
    """Return where a committed checkpoint waits while its step is saved again."""
    return checkpoint.with_name(checkpoint.name + SUPERSEDED)


def discard(storage: Storage, checkpoint: Path) -> None:
    """Remove a checkpoint: out of the run directory at once, manifest and all, then file by file.

    Where it is cut short, the next start removes the rest.
    """
    gone = checkpoint.parent / CONTROL / f"remove-{checkpoint.name}"
    if gone.exists() or gone.is_symlink():
        remove_tree(storage, gone)
    storage.replace(checkpoint, gone)
    storage.sync(gone.parent)
    storage.sync(checkpoint.parent)
    remove_tree(storage, gone)


class PendingCheckpoint:
    """A checkpoint that is being written.

    Args:
        storage: where to write.
        ranks: the ranks that write it together; with a background commit, a channel of its own.
        path: the checkpoint's directory; its parent is the run directory.
        step: optimizer steps completed.
        fence: raises where another start owns the run directory.
    """

    def __init__(self, storage: Storage, ranks: Ranks, path: Path, step: int, fence: Callable[[], None]) -> None:
        self.storage = storage
        self.ranks = ranks
        self.path = path
        self.step = step
        self.fence = fence

    @property
    def directory(self) -> Path:
        """Where the parts that this package adds go."""
        return self.path / DIRECTORY

    def open(self, set_aside: Callable[[Path], object]) -> None:
        """Make the pending directory appear, marked as such from its first instant. Every rank calls it.

        Args:
            set_aside: moves a checkpoint out of the way.
        """
        self._or_abandon(
            lambda: self._together(lambda: self._make_directory(set_aside) if self.ranks.rank == 0 else None, "begin")
        )

    def _make_directory(self, set_aside: Callable[[Path], object]) -> None:
        """Put an empty pending directory in place.

        A committed checkpoint of the same name steps aside but stays valid; a foreign one is set aside; a pending one
        is what a crash left and goes.
        """
        self.fence()
        if is_committed(self.path):
            older = superseded(self.path)
            if older.exists():
                set_aside(older)
            self.storage.replace(self.path, older)
        elif is_pending(self.path):
            discard(self.storage, self.path)
        elif self.path.exists() or self.path.is_symlink():
            set_aside(self.path)
        new = self.path.parent / CONTROL / f"begin-{self.path.name}"
        self.storage.make_directory(new / DIRECTORY)
        self.storage.write(new / DIRECTORY / PENDING, b"This checkpoint is being written; manifest.json ends that.\n")
        self.storage.sync(new / DIRECTORY / PENDING)
        self.storage.replace(new, self.path)

    def write(self, work: Callable[[], T]) -> list[T]:
        """Let every rank write files and return what ``work`` returned on each; where one fails, all raise.

        Raises:
            SaveFailed: this rank could not write.
            PeerFailed: another rank could not.
        """
        return self._or_abandon(lambda: self._together(work, "write"))

    def require_visible(self) -> None:
        """Check that this rank sees the directory that rank zero made. Each rank calls it as part of :meth:`write`.

        Raises:
            SaveFailed: it does not: the ranks have run directories of their own.
        """
        if not is_pending(self.path):
            raise SaveFailed(
                f"rank {self.ranks.rank} does not see {self.path.name}, which rank 0 has begun: all ranks need the "
                "same run directory, on storage that they share. Nothing is committed",
                path=self.path,
                step=self.step,
            )

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
    ) -> Manifest:
        """Commit on all ranks or on none.

        Args:
            files: this rank's files.
            describe: makes the manifest from all ranks' entries; called on rank zero.

        Raises:
            SaveFailed: this rank could not write, or rank zero could not commit.
            PeerFailed: another rank could not.
        """
        entries = self._or_abandon(lambda: self._together(lambda: self.seal(files), "force onto the disk"))
        everything = tuple(entry for of_rank in entries for entry in of_rank)
        manifest = self._or_abandon(lambda: self._together(lambda: self._mark(everything, describe), "commit"))[0]
        assert manifest is not None, "rank zero commits"
        return manifest

    def _mark(
        self,
        entries: tuple[FileEntry, ...],
        describe: Callable[[tuple[FileEntry, ...]], Manifest],
    ) -> Manifest | None:
        if self.ranks.rank != 0:
            return None
        manifest = describe(entries)
        self.fence()
        self.storage.sync(self.path.parent)
        write_atomically(self.storage, marker(self.path), manifests.encode(manifest))
        return manifest

    def announce(self) -> None:
        """After the commit, point ``latest`` at the checkpoint. Rank zero calls it."""
        self.storage.remove_file(self.directory / PENDING)
        point_to(self.storage, self.path.parent / LATEST, self.path.name)

    def _together(self, work: Callable[[], T], doing: str) -> list[T]:
        return everywhere(self.ranks, work, f"{doing} {self.path.name}", functools.partial(self._failed, doing=doing))

    def _failed(self, cause: Exception, doing: str) -> SaveFailed:
        return SaveFailed(
            f"rank {self.ranks.rank} could not {doing} {self.path.name}: {cause}. It is not committed; the checkpoints "
            "committed before it are intact. Free space or mend permissions, then launch the same command again",
            path=self.path,
            step=self.step,
        )

    def _or_abandon(self, work: Callable[[], list[T]]) -> list[T]:
        try:
            return work()
        except ResumeError:
            if self.ranks.rank == 0:
                self._abandon()
            raise

    def _abandon(self) -> None:
        """Remove what a failed save wrote, where that is possible, and put back the checkpoint that it was to replace.

        What is committed after all stays, and so does what a later start may be writing under the same name.
        """
        with contextlib.suppress(OSError, FencedOff):
            self.fence()
            if is_pending(self.path):
                discard(self.storage, self.path)
            if superseded(self.path).exists() and not self.path.exists():
                self.storage.replace(superseded(self.path), self.path)
