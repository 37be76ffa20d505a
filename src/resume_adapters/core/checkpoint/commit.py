"""A checkpoint from pending to committed. No other module writes the commit marker.

A pending checkpoint has the marker ``pending`` but no ``manifest.json`` (paths are in
:mod:`resume_adapters.core.checkpoint.layout`). The manifest, written last and renamed into place, is the commit: before
it the checkpoint does not exist, after it the checkpoint is complete, because all its files were forced onto the disk
first.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from resume_adapters.core.checkpoint import layout
from resume_adapters.core.checkpoint.layout import (
    CONTROL,
    LATEST,
    PENDING,
    CheckpointState,
    must_be_restored,
    state_of,
    superseded_path,
)
from resume_adapters.core.checkpoint.manifest import FileEntry, Manifest, encode_manifest
from resume_adapters.core.checkpoint.remove import delete, restore_superseded, supersede
from resume_adapters.core.ranks import Ranks, run_on_all_ranks
from resume_adapters.core.storage.base import Pointer, Storage, point_to, write_atomically
from resume_adapters.core.storage.groups import StorageGroup, shared_by_all
from resume_adapters.errors import FencedOff, ResumeError, SaveFailed

T = TypeVar("T")

_PENDING, _COMMITTED, _SUPERSEDED, _DAMAGED, _FOREIGN, _REMOVED = (
    CheckpointState.PENDING,
    CheckpointState.COMMITTED,
    CheckpointState.SUPERSEDED,
    CheckpointState.DAMAGED,
    CheckpointState.FOREIGN,
    CheckpointState.REMOVED,
)

TRANSITIONS: Mapping[CheckpointState, frozenset[CheckpointState]] = {
    # A save reserves the name.
    _REMOVED: frozenset({_PENDING}),
    # The save is committed; or it failed, and the name is free again or goes back to the superseded checkpoint.
    _PENDING: frozenset({_COMMITTED, _REMOVED, _SUPERSEDED}),
    # The name is saved again; or retention removes the checkpoint: one that is a file becomes pending first, since two
    # renames move it. Only a defect of the disk, or a person, damages it.
    _COMMITTED: frozenset({_SUPERSEDED, _REMOVED, _PENDING, _DAMAGED}),
    # The second save takes the name; or it failed, and the checkpoint is restored.
    _SUPERSEDED: frozenset({_PENDING, _COMMITTED}),
    # Both are only ever set aside.
    _DAMAGED: frozenset({_REMOVED}),
    _FOREIGN: frozenset({_REMOVED}),
}
"""What may become of the name of a checkpoint, in one operation of the storage."""


class PendingCheckpoint:
    """A checkpoint that is being written.

    Args:
        storage: where to write.
        ranks: the ranks that write it together.
        path: the checkpoint; its parent is the run directory.
        step: optimizer steps completed.
        fence: raises if another start owns the run directory.
        is_file: the framework writes one file of that name, not a directory.
        storage_group: the ranks that share the run directory; all by default.
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
        storage_group: StorageGroup | None = None,
    ) -> None:
        self.storage = storage
        self.ranks = ranks
        self.path = path
        self.step = step
        self.fence = fence
        self.is_file = is_file
        self.storage_group = shared_by_all(ranks) if storage_group is None else storage_group

    @property
    def directory(self) -> Path:
        """This package's directory of the checkpoint."""
        return layout.sidecar_dir(self.path) if self.is_file else layout.inner_dir(self.path)

    def open(self, set_aside: Callable[[Path], object]) -> None:
        """Create the pending checkpoint, which has its marker from the first instant. Every rank calls it.

        Args:
            set_aside: moves a checkpoint out of the way.
        """
        self._or_abandon(
            lambda: self._on_all(
                self.ranks, lambda: self._reserve(set_aside) if self.storage_group.is_leader else None, "begin"
            )
        )

    def _reserve(self, set_aside: Callable[[Path], object]) -> None:
        """Free the name, and rename an empty pending directory to it."""
        self.fence()
        self._free_name(set_aside)
        new = self.path.parent / CONTROL / f"begin-{self.path.name}"
        extras = new if self.is_file else layout.inner_dir(new)
        self.storage.make_directory(extras)
        self.storage.write(extras / PENDING, b"This checkpoint is being written; manifest.json ends that.\n")
        self.storage.sync(extras / PENDING)
        self.storage.replace(new, layout.sidecar_dir(self.path) if self.is_file else self.path)

    def _free_name(self, set_aside: Callable[[Path], object]) -> None:
        state = state_of(self.storage, self.path)
        if self.storage.is_link(self.path) or state in (_DAMAGED, _FOREIGN):
            set_aside(self.path)
        elif state is _COMMITTED:
            older = superseded_path(self.path)
            if layout.root_paths(self.storage, older):
                set_aside(older)
            supersede(self.storage, self.path)
        elif state is _PENDING:  # left by a crash
            delete(self.storage, self.path)

    def write(self, work: Callable[[], T]) -> list[T]:
        """Let every rank write files, and return the results of ``work`` on all ranks. If one fails, all raise.

        Raises:
            SaveFailed: this rank could not write.
            PeerFailed: another rank could not.
        """
        return self._or_abandon(lambda: self._on_all(self.ranks, work, "write"))

    def require_visible(self) -> None:
        """Check that this rank sees the directory that its leader created. Every rank calls it in :meth:`write`.

        Raises:
            SaveFailed: it does not: the ranks do not share the run directory.
        """
        if state_of(self.storage, self.path) is not _PENDING:
            raise SaveFailed(
                f"rank {self.ranks.rank} does not see {self.path.name}, which rank {self.storage_group.leader} has "
                "begun: all ranks need the same run directory, on storage that they share. Nothing is committed",
                path=self.path,
                step=self.step,
            )

    def flush_files(self, files: Iterable[tuple[Path, Path]]) -> list[FileEntry]:
        """Force this rank's files onto the disk, and return their entries for the manifest.

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
        ranks: Ranks,
        files: Iterable[tuple[Path, Path]],
        describe: Callable[[tuple[FileEntry, ...]], Manifest],
    ) -> Manifest:
        """Commit on all ranks or on none. Every rank calls it.

        Args:
            ranks: the ranks of the run, on the channel of the calling thread.
            files: this rank's files, each after its path for the manifest.
            describe: makes the manifest from the entries of the ranks that share the run directory; called on their
                leader.

        Raises:
            SaveFailed: this rank could not write, or the leader could not commit.
            PeerFailed: another rank could not.
        """
        entries = self._or_abandon(lambda: self._on_all(ranks, lambda: self.flush_files(files), "force onto the disk"))
        here = tuple(entry for rank in self.storage_group.members for entry in entries[rank])
        written = self._or_abandon(lambda: self._on_all(ranks, lambda: self._write_marker(here, describe), "commit"))
        manifest = written[self.storage_group.leader]
        assert manifest is not None, "the leader commits"
        return manifest

    def _write_marker(
        self,
        entries: tuple[FileEntry, ...],
        describe: Callable[[tuple[FileEntry, ...]], Manifest],
    ) -> Manifest | None:
        if not self.storage_group.is_leader:
            return None
        manifest = describe(entries)
        self.fence()
        self.storage.sync(self.path.parent)
        write_atomically(self.storage, self.directory / layout.MANIFEST, encode_manifest(manifest))
        return manifest

    def publish(self, form: Pointer) -> None:
        """Point ``latest`` at the committed checkpoint. The leader calls it."""
        self.storage.remove_file(self.directory / PENDING)
        point_to(self.storage, self.path.parent / LATEST, self.path.name, form)

    def _on_all(self, ranks: Ranks, work: Callable[[], T], doing: str) -> list[T]:
        return run_on_all_ranks(ranks, work, f"{doing} {self.path.name}", functools.partial(self._failed, doing=doing))

    def _failed(self, cause: Exception, doing: str) -> SaveFailed:
        return SaveFailed(
            f"rank {self.ranks.rank} could not {doing} {self.path.name}: {cause}. It is not committed; the checkpoints "
            "committed before it are intact. Free space or fix permissions, then launch the same command again",
            path=self.path,
            step=self.step,
        )

    def _or_abandon(self, work: Callable[[], list[T]]) -> list[T]:
        try:
            return work()
        except ResumeError:
            if self.storage_group.is_leader:
                self._abandon()
            raise

    def _abandon(self) -> None:
        """Remove the files of a failed save, if possible, and restore the checkpoint that it was to replace.

        A checkpoint that is committed nevertheless stays, and so does what a later start writes under the same name.
        """
        with contextlib.suppress(OSError, FencedOff):
            self.fence()
            if state_of(self.storage, self.path) is _PENDING:
                delete(self.storage, self.path)
            if must_be_restored(self.storage, self.path):
                restore_superseded(self.storage, self.path)
