"""A checkpoint from pending to committed. No other module writes the commit marker.

A pending checkpoint has the marker ``pending`` but no ``manifest.json`` (paths are in
:mod:`resume_adapters.core.checkpoint.layout`). The manifest, written last and renamed into place, is the commit: before
it the checkpoint does not exist, after it the checkpoint is complete, because all its files were forced onto the disk
first.

A start may be frozen at any moment and wake up when a later one has saved the same step. So nothing is written under a
name that a later start may use: all files are written in a directory named by a token, then the checkpoint gets its
name, and its markers are changed through a descriptor of their directory. A start removes what earlier ones left before
it saves, and whatever they still write is lost with that.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from resume_adapters.core.checkpoint import layout
from resume_adapters.core.checkpoint.layout import (
    CONTROL,
    PENDING,
    CheckpointState,
    Pointer,
    must_be_restored,
    point_latest,
    state_of,
    superseded_path,
)
from resume_adapters.core.checkpoint.manifest import FileEntry, Manifest, encode_manifest
from resume_adapters.core.checkpoint.remove import (
    BEGUN,
    Fence,
    delete,
    delete_begun,
    fenced_off,
    move,
    restore_superseded,
    set_aside,
    supersede,
)
from resume_adapters.core.ranks import Ranks, run_on_all_ranks
from resume_adapters.core.storage.base import Storage, find_disk_error, is_present, write_atomically
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
    # Both are set aside. What a script writes under the name of a save that is under way becomes a part of it.
    _DAMAGED: frozenset({_REMOVED}),
    _FOREIGN: frozenset({_REMOVED, _PENDING}),
}
"""What may become of the name of a checkpoint, in one operation of the storage."""


class PendingCheckpoint:
    """A checkpoint that is being written.

    Args:
        storage: where to write.
        ranks: the ranks that write it together.
        path: the checkpoint, once it has its name; its parent is the run directory.
        step: optimizer steps completed.
        fence: raises if another start owns the run directory.
        is_file: the framework writes one file of that name, not a directory.
        storage_group: the ranks that share the run directory; all by default.
        clear: frees the name of what is no checkpoint to return to; it is set aside by default.
    """

    def __init__(
        self,
        storage: Storage,
        ranks: Ranks,
        path: Path,
        step: int,
        fence: Fence,
        *,
        is_file: bool = False,
        storage_group: StorageGroup | None = None,
        clear: Callable[[Storage, Path, Fence], object] = set_aside,
    ) -> None:
        self.storage = storage
        self.ranks = ranks
        self.path = path
        self.step = step
        self.fence = fence
        self._clear: Callable[[Path], object] = lambda taken: clear(storage, taken, fence)
        self.is_file = is_file
        self.storage_group = shared_by_all(ranks) if storage_group is None else storage_group
        self.place = path
        """Where the checkpoint is now: under its name, or before that where all ranks write it."""
        self._held: Path | None = None
        self._emptied: Path | None = None
        self._written: dict[Path, tuple[int, str]] = {}

    @property
    def directory(self) -> Path:
        """This package's directory of the checkpoint."""
        return layout.own_dir(self.place, is_file=self.is_file)

    # ---- Writing

    def open(self) -> None:
        """Create the pending checkpoint, which has its marker from the first instant. Every rank calls it."""
        places = self._on_all(
            self.ranks, lambda: self._reserve() if self.storage_group.is_leader else self.path, "begin"
        )
        self.place = places[self.storage_group.leader]

    def _reserve(self) -> Path:
        """Begin an empty pending checkpoint, and return where it is."""
        self.fence()
        self._free_name()
        self.place = self.path.parent / CONTROL / f"{BEGUN}{uuid.uuid4().hex}" / self.path.name
        self.storage.make_directory(self.directory)
        self.storage.write(self.directory / PENDING, layout.pending_text(self.path.name))
        self.storage.hold(self.directory)
        self._held = self.directory
        return self.place

    def _free_name(self) -> None:
        """Remove or set aside what has the name; a committed checkpoint keeps it until :meth:`reveal`."""
        if not self._is_taken():
            return
        state = state_of(self.storage, self.path)
        if self.storage.is_link(self.path) or state in (_DAMAGED, _FOREIGN):
            self._clear(self.path)
        elif state is _PENDING:  # left by a crash
            delete(self.storage, self.path, self.fence)

    def _is_taken(self) -> bool:
        """Return whether anything has the name, or is beside a checkpoint of that name."""
        return any(is_present(self.storage, each) for each in (self.path, layout.sidecar_dir(self.path)))

    def reveal(self) -> None:
        """Give the pending checkpoint its name, and supersede the committed one that had it. Every rank calls it.

        Whose files are still to be written gets its name when it is committed: what has a name is whole.
        """
        self._on_all(self.ranks, lambda: self._reveal_here() if self.storage_group.is_leader else None, "name")
        self.place = self.path

    def _reveal_here(self) -> None:
        # Under its name it must have its marker, also after a loss of power.
        for path in (self.directory / PENDING, self.directory, *([] if self.is_file else [self.place])):
            self.storage.sync(path)
        if self._is_taken():
            self._supersede_or_take_in()
        written, self.place = self.place, self.path
        # A file alone would look foreign, so the marker gets its name first.
        marked = {layout.sidecar_dir(written): layout.sidecar_dir(self.path)} if self.is_file else {}
        move(self.storage, {**marked, written: self.path}, self.fence)
        self._take_out(written.parent)

    def _supersede_or_take_in(self) -> None:
        if state_of(self.storage, self.path) is _COMMITTED and not self.storage.is_link(self.path):
            older = superseded_path(self.path)
            if layout.root_paths(self.storage, older):
                self._clear(older)
            supersede(self.storage, self.path, self.fence)
        elif is_present(self.storage, self.path):
            self._take_in()

    def _take_in(self) -> None:
        """Add to the checkpoint what the script has meanwhile written under its name, past the path that it was given.

        What the checkpoint has already is set aside.
        """
        if not self.is_file:
            for entry in self.storage.entries(self.path):
                if not is_present(self.storage, self.place / entry.name):
                    move(self.storage, {self.path / entry.name: self.place / entry.name}, self.fence)
        if self.is_file or self.storage.entries(self.path):
            self._clear(self.path)

    def _take_out(self, begun: Path) -> None:
        """Move to the run directory what the script has written beside the checkpoint; what was begun is then empty."""
        for entry in self.storage.entries(begun):
            beside = self.path.with_name(entry.name)
            if entry.kind != "directory" or not is_present(self.storage, beside):
                move(self.storage, {begun / entry.name: beside}, self.fence)
        self._emptied = begun

    def write(self, work: Callable[[], T]) -> list[T]:
        """Write files on every rank, and return the results of ``work`` on all ranks. If one fails, all raise.

        Args:
            work: writes; it must not communicate with other ranks.

        Raises:
            SaveFailed: this rank could not write.
            PeerFailed: another rank could not.
        """
        return self._on_all(self.ranks, work, "write")

    def require_visible(self) -> None:
        """Check that this rank sees the directory that its leader created. Every rank calls it in :meth:`write`.

        Raises:
            SaveFailed: it does not: the ranks do not share the run directory.
        """
        if not self.storage.is_file(self.directory / PENDING):
            raise SaveFailed(
                f"rank {self.ranks.rank} does not see {self.path.name}, which rank {self.storage_group.leader} has "
                "begun: all ranks need the same run directory, on storage that they share. Nothing is committed",
                path=self.path,
                step=self.step,
            )

    def write_file(self, path: Path, content: bytes) -> None:
        """Write a file of this package. The manifest will have the digest of these bytes, not of what was stored."""
        self.storage.write(path, content)
        self._written[path.relative_to(self.directory)] = len(content), xxhash.xxh3_128_hexdigest(content)

    # ---- Committing

    def flush_files(
        self, files: Iterable[tuple[Path, Path]], write: Callable[[], Mapping[Path, tuple[int, str]]] = dict
    ) -> list[FileEntry]:
        """Force this rank's files onto the disk, and return their entries for the manifest.

        Args:
            files: each after its path for the manifest.
            write: writes the files that are still missing, and returns the size and digest of each, by its path in
                the checkpoint: what they are to hold.

        Raises:
            OSError: a file could not be written; or the disk returns other bytes than :meth:`write_file` wrote.
        """
        entries = []
        written = {self.place / path: found for path, found in write().items()}
        directories = {self.directory, self.directory.parent}
        for path, file in files:
            self.storage.sync(file)
            size, digest = written.get(file) or self.storage.digest(file)
            own = file.relative_to(self.directory) if file.is_relative_to(self.directory) else file
            if self._written.get(own, (size, digest)) != (size, digest):
                raise OSError(errno.EIO, "the stored bytes are not those that were written", str(file))
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
        write: Callable[[], Mapping[Path, tuple[int, str]]] = dict,
    ) -> Manifest:
        """Commit on all ranks or on none. Every rank calls it.

        Args:
            ranks: the ranks of the run, on the channel of the calling thread.
            files: this rank's files, each after its path for the manifest.
            describe: makes the manifest from the entries of the ranks that share the run directory; called on their
                leader.
            write: see :meth:`flush_files`.

        Raises:
            SaveFailed: this rank could not write, or the leader could not commit.
            PeerFailed: another rank could not.
        """
        entries = self._on_all(ranks, lambda: self.flush_files(files, write), "force onto the disk")
        here = tuple(entry for rank in self.storage_group.members for entry in entries[rank])
        written = self._on_all(ranks, lambda: self._write_marker(here, describe), "commit")
        manifest = written[self.storage_group.leader]
        assert manifest is not None, "the leader commits"
        return manifest

    def _write_marker(
        self,
        entries: tuple[FileEntry, ...],
        describe: Callable[[tuple[FileEntry, ...]], Manifest],
    ) -> Manifest | None:
        if not self.storage_group.is_leader:
            self.place = self.path
            return None
        manifest = describe(entries)
        self.fence()
        if self.place != self.path:
            self._reveal_here()
        self._delete_emptied()
        self.storage.sync(self.path.parent)
        assert self._held is not None, "the leader has begun the checkpoint"
        write_atomically(self.storage, self._held / layout.MANIFEST, encode_manifest(manifest))
        return manifest

    def _delete_emptied(self) -> None:
        emptied, self._emptied = self._emptied, None
        if emptied is not None:
            delete_begun(self.storage, emptied)

    def drop(self) -> None:
        """Remove what all ranks have written, and restore the checkpoint that it was to replace; all call it."""
        if self.storage_group.is_leader:
            self._abandon()
        self.ranks.barrier()

    def announce(self, form: Pointer, append: Callable[..., object], manifest: Manifest, **facts: Any) -> None:
        """Publish a committed checkpoint as the newest one, and add it to the journal. The leader calls it.

        Args:
            form: how ``latest`` names it.
            append: appends an entry to the journal.
            manifest: what it contains.
            facts: what else the entry says.
        """
        self.fence()
        point_latest(self.storage, self.path.parent, self.path.name, form)
        name, reason, cursor = self.path.name, manifest.reason, manifest.cursor
        append("commit", step=self.step, checkpoint=name, reason=reason, cursor=cursor, **facts)
        self.complete()

    def complete(self) -> None:
        """Remove the marker of a pending checkpoint, once all that follows a commit is done. The leader calls it."""
        assert self._held is not None, "the leader has begun the checkpoint"
        self.fence()
        self.storage.remove_file(self._held / PENDING)

    def set_replaced_aside(self) -> None:
        """Set aside the checkpoint that had the name, where pruning has left it. The leader calls it."""
        replaced = superseded_path(self.path)
        if layout.root_paths(self.storage, replaced):
            self._clear(replaced)

    def release(self) -> None:
        """Release the checkpoint's directory, committed or not; a no-op where it is not held. Any rank may call it."""
        held, self._held = self._held, None
        if held is not None:
            self.storage.release(held)

    def _on_all(self, ranks: Ranks, work: Callable[[], T], doing: str) -> list[T]:
        """Return what ``work`` returns on all ranks; where it fails on one, all abandon the save.

        Raises:
            FencedOff: a later start owns the run directory, which may be why it failed. An error that says to launch
                again would let two supervisors evict each other for ever.
        """
        try:
            return run_on_all_ranks(
                ranks, work, f"{doing} {self.path.name}", functools.partial(self._failed, doing=doing)
            )
        except ResumeError as error:
            later = fenced_off(self.fence) if self.storage_group.is_leader else None
            if self.storage_group.is_leader:
                self._abandon()
            found = next((each for each in ranks.gather(later and later.message) if each), None)
            if found is None or isinstance(error, FencedOff):
                raise
            raise FencedOff(found, path=self.path, step=self.step) from error

    def _failed(self, cause: Exception, doing: str) -> SaveFailed:
        found = find_disk_error(self.storage, self.directory, cause)
        reason = cause if found is None or str(found) in str(cause) else f"{found.strerror} ({cause})"
        is_gone = isinstance(cause, FileNotFoundError) and self.storage.is_directory(self.directory)
        remedy = (
            "Something has removed that file since it was saved, such as a callback of the script: let that keep it "
            "until the next checkpoint is saved"
            if is_gone
            else "Free space or fix permissions"
            if isinstance(cause, OSError) or found is not None
            else "It is no error of the disk: leave out of what is saved what cannot be"
        )
        return SaveFailed(
            f"rank {self.ranks.rank} could not {doing} {self.path.name}: {reason}. It is not committed; the "
            f"checkpoints committed before it are intact. {remedy}, then launch the same command again",
            path=self.path,
            step=self.step,
            errno=found.errno if found else None,
        )

    def _abandon(self) -> None:
        """Remove the files of a failed save, if possible, and restore the checkpoint that it was to replace.

        A checkpoint that is committed nevertheless stays, and so does what a later start writes under the same name.
        """
        self.release()
        with contextlib.suppress(OSError, FencedOff):
            if self.place != self.path:
                delete_begun(self.storage, self.place.parent)
            self._delete_emptied()
            self.fence()
            if state_of(self.storage, self.path) is _PENDING:
                delete(self.storage, self.path, self.fence)
            if must_be_restored(self.storage, self.path):
                restore_superseded(self.storage, self.path, self.fence)
