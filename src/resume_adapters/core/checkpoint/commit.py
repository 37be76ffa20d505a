"""The life of a checkpoint from pending to committed. This module is the only writer of the commit marker.

A pending checkpoint has the marker ``pending`` but no ``manifest.json``
(:mod:`resume_adapters.core.checkpoint.layout` says where). The manifest, written last and renamed into place, is the
commit: before it the checkpoint does not exist, after it the checkpoint is whole, because all its files were forced
onto the disk first.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from resume_adapters.core.checkpoint import layout
from resume_adapters.core.checkpoint.layout import CONTROL, LATEST, PENDING, is_committed, is_pending, superseded_path
from resume_adapters.core.checkpoint.manifest import FileEntry, Manifest, encode_manifest
from resume_adapters.core.checkpoint.remove import delete, restore_superseded, supersede
from resume_adapters.core.ranks import Ranks, run_on_all_ranks
from resume_adapters.core.storage.base import Pointer, Storage, point_to, write_atomically
from resume_adapters.core.storage.groups import StorageGroup, shared_by_all
from resume_adapters.errors import FencedOff, ResumeError, SaveFailed

T = TypeVar("T")


class PendingCheckpoint:
    """A checkpoint that is being written.

    Args:
        storage: where to write.
        ranks: the ranks that write it together; with a background commit, a channel of its own.
        path: the checkpoint; its parent is the run directory.
        step: optimizer steps completed.
        fence: raises where another start owns the run directory.
        is_file: the framework writes one file of that name, not a directory.
        sharing: which ranks share the run directory; by default, all.
    """

    def __init__(
        self,
        storage: Storage,
        ranks: Ranks,
        path: Path,
        step: int,
        fence: Callable[[], None],
        *,
        is_file: bool = False,
        sharing: StorageGroup | None = None,
    ) -> None:
        self.storage = storage
        self.ranks = ranks
        self.path = path
        self.step = step
        self.fence = fence
        self.is_file = is_file
        self.sharing = shared_by_all(ranks) if sharing is None else sharing

    @property
    def directory(self) -> Path:
        """Where this package puts what it adds."""
        return layout.sidecar_dir(self.path) if self.is_file else layout.inner_dir(self.path)

    def open(self, set_aside: Callable[[Path], object]) -> None:
        """Make the pending directory appear, marked as such from its first instant. Every rank calls it.

        Args:
            set_aside: moves a checkpoint out of the way.
        """
        self._or_abandon(
            lambda: self._together(lambda: self._make_directory(set_aside) if self.sharing.leads else None, "begin")
        )

    def _make_directory(self, set_aside: Callable[[Path], object]) -> None:
        """Put an empty pending directory in place.

        A committed checkpoint of the same name steps aside but stays valid; a foreign one is set aside; a pending one
        is what a crash left and goes.
        """
        self.fence()
        if self.path.is_symlink():
            set_aside(self.path)
        elif is_committed(self.path):
            older = superseded_path(self.path)
            if layout.root_paths(older):
                set_aside(older)
            supersede(self.storage, self.path)
        elif is_pending(self.path):
            delete(self.storage, self.path)
        elif layout.root_paths(self.path):
            set_aside(self.path)
        new = self.path.parent / CONTROL / f"begin-{self.path.name}"
        own = new if self.is_file else layout.inner_dir(new)
        self.storage.make_directory(own)
        self.storage.write(own / PENDING, b"This checkpoint is being written; manifest.json ends that.\n")
        self.storage.sync(own / PENDING)
        self.storage.replace(new, layout.sidecar_dir(self.path) if self.is_file else self.path)

    def write(self, work: Callable[[], T]) -> list[T]:
        """Let every rank write files and return what ``work`` returned on each; where one fails, all raise.

        Raises:
            SaveFailed: this rank could not write.
            PeerFailed: another rank could not.
        """
        return self._or_abandon(lambda: self._together(work, "write"))

    def require_visible(self) -> None:
        """Check that this rank sees the directory that its leader made. Each rank calls it as part of :meth:`write`.

        Raises:
            SaveFailed: it does not: the ranks have run directories of their own.
        """
        if not is_pending(self.path):
            raise SaveFailed(
                f"rank {self.ranks.rank} does not see {self.path.name}, which rank {self.sharing.leader} has begun: "
                "all ranks need the same run directory, on storage that they share. Nothing is committed",
                path=self.path,
                step=self.step,
            )

    def seal(self, files: Iterable[tuple[Path, Path]]) -> list[FileEntry]:
        """Force this rank's files onto the disk and return their entries.

        Args:
            files: each after its path for the manifest.
        """
        entries = []
        directories = {self.directory, self.directory.parent}
        for path, file in files:
            self.storage.sync(file)
            size, digest = self.storage.digest(file)
            entries.append(FileEntry(path.as_posix(), size, digest, self.ranks.rank))
            directories.update(parent for parent in file.parents if self.directory.parent in parent.parents)
        for directory in sorted(directories):
            self.storage.sync(directory)
        return entries

    def commit(
        self,
        files: Iterable[tuple[Path, Path]],
        describe: Callable[[tuple[FileEntry, ...]], Manifest],
    ) -> Manifest:
        """Commit on all ranks or on none.

        Args:
            files: this rank's files, each after its path for the manifest.
            describe: makes the manifest from the entries of the ranks that share the run directory; called on the one
                that leads it.

        Raises:
            SaveFailed: this rank could not write, or the one that leads the run directory could not commit.
            PeerFailed: another rank could not.
        """
        entries = self._or_abandon(lambda: self._together(lambda: self.seal(files), "force onto the disk"))
        here = tuple(entry for rank in self.sharing.members for entry in entries[rank])
        marked = self._or_abandon(lambda: self._together(lambda: self._mark(here, describe), "commit"))
        manifest = marked[self.sharing.leader]
        assert manifest is not None, "the leader commits"
        return manifest

    def _mark(
        self,
        entries: tuple[FileEntry, ...],
        describe: Callable[[tuple[FileEntry, ...]], Manifest],
    ) -> Manifest | None:
        if not self.sharing.leads:
            return None
        manifest = describe(entries)
        self.fence()
        self.storage.sync(self.path.parent)
        write_atomically(self.storage, self.directory / layout.MANIFEST, encode_manifest(manifest))
        return manifest

    def announce(self, form: Pointer) -> None:
        """After the commit, point ``latest`` at the checkpoint. The leader calls it."""
        self.storage.remove_file(self.directory / PENDING)
        point_to(self.storage, self.path.parent / LATEST, self.path.name, form)

    def _together(self, work: Callable[[], T], doing: str) -> list[T]:
        return run_on_all_ranks(
            self.ranks, work, f"{doing} {self.path.name}", functools.partial(self._failed, doing=doing)
        )

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
            if self.sharing.leads:
                self._abandon()
            raise

    def _abandon(self) -> None:
        """Remove what a failed save wrote, where that is possible, and put back the checkpoint that it was to replace.

        What is committed after all stays, and so does what a later start may be writing under the same name.
        """
        with contextlib.suppress(OSError, FencedOff):
            self.fence()
            if is_pending(self.path):
                delete(self.storage, self.path)
            if layout.is_superseded(self.path):
                restore_superseded(self.storage, self.path)
