"""A tier: a place beyond the run directory that holds copies of committed checkpoints; and how one comes from there.

A copy is written through a pending checkpoint, like any save. It is committed with the manifest of the original, once
every file has the digest that the manifest says. So a kill on the way leaves a pending checkpoint, which the next start
removes.
"""

from __future__ import annotations

import contextlib
import errno
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from resume_adapters.core.checkpoint import layout
from resume_adapters.core.checkpoint.commit import PendingCheckpoint
from resume_adapters.core.checkpoint.layout import EXTRAS, Pointer
from resume_adapters.core.checkpoint.manifest import FileEntry, Manifest
from resume_adapters.core.checkpoint.remove import Fence
from resume_adapters.core.checkpoint.writer import send_missing
from resume_adapters.core.ranks import Ranks, run_on_all_ranks
from resume_adapters.core.run_directory.journal import Journal
from resume_adapters.core.storage.base import Bytes, Storage, read_pieces, write_pieces
from resume_adapters.core.storage.groups import StorageGroup, shared_by_all
from resume_adapters.errors import CheckpointDamaged, TierUnavailable


class Identity(NamedTuple):
    """Which save a checkpoint is: two of one name and step may be of different starts.

    They compare as a resume prefers them: the later step, and of one step what was written later.
    """

    step: int
    written: float
    generation: int
    name: str

    @classmethod
    def of(cls, name: str, manifest: Manifest) -> Identity:
        """Return the identity of a checkpoint."""
        return cls(manifest.step, manifest.written, manifest.generation, name)


@dataclass(frozen=True)
class TierCheckpoint:
    """A checkpoint that is on a tier: its manifest is there.

    Attributes:
        place: where on the tier; two saves of one name have different places.
        name: its name in the run directory.
        manifest: what it contains.
    """

    place: str
    name: str
    manifest: Manifest

    @property
    def identity(self) -> Identity:
        """Which save it is."""
        return Identity.of(self.name, self.manifest)


class Tier(Protocol):
    """What a resume may take a checkpoint from. Methods may raise :class:`~resume_adapters.errors.TierUnavailable`."""

    @property
    def label(self) -> str:
        """Where it is, for messages; without credentials."""

    def checkpoints(self) -> list[TierCheckpoint]:
        """Return the checkpoints that are there, the one that a resume prefers first."""

    @property
    def unreadable(self) -> list[str]:
        """The places that :meth:`checkpoints` has found whose manifests are damaged, or of a later version."""

    def sizes(self, found: TierCheckpoint) -> Mapping[str, int]:
        """Return the sizes of the files of a checkpoint that are listed, by their paths in the manifest."""

    def read(self, found: TierCheckpoint, entry: FileEntry) -> Iterator[Bytes]:
        """Yield the content of a file, from its begin to its end.

        Raises:
            CheckpointDamaged: it is not there, or larger. One that is shorter, or has changed, its digest tells.
        """

    def set_aside(self, after: int, before: int) -> None:
        """Set aside the checkpoints of earlier generations whose step is later: nobody resumes from them.

        Args:
            after: the step; -1 for all of them.
            before: the generation. That of this start may be later than the one with which it has claimed the tier.
        """


Read = Callable[[FileEntry], Iterator[Bytes]]
"""Yields the content of a file of the original. May raise :class:`CheckpointDamaged` and :class:`TierUnavailable`."""


def reading(storage: Storage, checkpoint: Path) -> Read:
    """Return what reads the files of a checkpoint on a disk."""
    return lambda entry: read_pieces(storage, layout.locate(storage, checkpoint, entry.path))


_NO_PATH_HERE = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP, errno.EILSEQ, errno.EINVAL)
"""What the system says of a path that this file system cannot have, or that something else has."""


def is_one_file(name: str, manifest: Manifest) -> bool:
    """Return whether the framework's part of a checkpoint is one file of the checkpoint's name."""
    return [entry.path for entry in manifest.files if Path(entry.path).parts[0] != EXTRAS] == [name]


def write_copy(
    pending: PendingCheckpoint, manifest: Manifest, entries: Sequence[FileEntry], read: Read, source: str
) -> None:
    """Write a copy, and commit it. All ranks of the pending checkpoint call it; the leader then completes it.

    Args:
        pending: the copy; it is not open yet.
        manifest: that of the original.
        entries: the files that this rank writes.
        read: reads one of them.
        source: where the original is, for messages.

    Raises:
        CheckpointDamaged: on all ranks: a file is not what the manifest says, and nothing is committed.
        TierUnavailable: on all ranks: a file could not be read, and nothing is committed.
        SaveFailed: a file could not be written.
    """
    pending.open()
    found = pending.write(lambda: _write_files(pending, entries, read, source))
    failure = next((each for each in found if each is not None), None)
    if failure is not None:
        pending.drop()
        raise failure
    _commit_copy(pending, manifest, entries)


def _commit_copy(pending: PendingCheckpoint, manifest: Manifest, entries: Sequence[FileEntry]) -> None:
    """Commit a copy whose files are written, and have the digests that the manifest says."""
    pending.reveal()
    files = [(Path(entry.path), layout.locate(pending.storage, pending.path, entry.path)) for entry in entries]
    digests = {file: (entry.bytes, entry.digest) for (_, file), entry in zip(files, entries, strict=True)}
    pending.commit(pending.ranks, files, lambda _: manifest, lambda: digests)


def _write_files(
    pending: PendingCheckpoint, entries: Sequence[FileEntry], read: Read, source: str
) -> CheckpointDamaged | TierUnavailable | None:
    """Write the files of this rank; return why one of the original cannot be used, ``None`` if all can."""
    pending.require_visible()
    for entry in entries:
        target = layout.locate(pending.storage, pending.place, entry.path)
        try:
            pending.storage.make_directory(target.parent)
            found = write_pieces(pending.storage, target, read(entry))
            if found != (entry.bytes, entry.digest):  # on the way, perhaps: read it once more
                found = write_pieces(pending.storage, target, read(entry))
        except (CheckpointDamaged, TierUnavailable) as error:
            return error
        except OSError as error:
            if error.errno not in _NO_PATH_HERE:
                raise
            return CheckpointDamaged(f"{source}/{entry.path} cannot be written here: {error.strerror}")
        if found != (entry.bytes, entry.digest):
            return CheckpointDamaged(
                f"{source}/{entry.path} has {found[0]} bytes with the digest {found[1]}, its manifest says "
                f"{entry.bytes} with {entry.digest}: its content has changed"
            )
    return None


BEGIN_A_COPY = "begin a copy"
"""What the leaders of nodes do together before one sends another a checkpoint."""


@dataclass(frozen=True)
class Fetch:
    """Brings checkpoints from a tier to one run directory.

    Attributes:
        storage: the file operations.
        ranks: those that share the run directory; all of them call :meth:`bring`.
        group: the same ranks, by their numbers in the run.
        directory: the run directory.
        fence: raises if another start owns the run directory.
        journal: gets an entry, as for a save.
        latest: how ``latest`` names the newest checkpoint.
    """

    storage: Storage
    ranks: Ranks
    group: StorageGroup
    directory: Path
    fence: Fence
    journal: Journal
    latest: Pointer

    def bring(self, tier: Tier, found: TierCheckpoint) -> None:
        """Fetch a checkpoint and commit it in the run directory. All ranks that share the directory call it.

        A checkpoint that has its name there is set aside.

        Raises:
            CheckpointDamaged: on all ranks: a file on the tier is not what the manifest says, and nothing is committed.
            TierUnavailable: the tier does not answer.
            SaveFailed: a file could not be written.
        """
        read, source = functools.partial(tier.read, found), f"{tier.label}/{found.place}"
        self.copy(found.name, found.manifest, read, source, fetched_from=tier.label)

    def copy(self, name: str, manifest: Manifest, read: Read, source: str, **facts: Any) -> None:
        """Commit a copy of a checkpoint in the run directory. All ranks that share the directory call it.

        Args:
            name: of the checkpoint.
            manifest: that of the original.
            read: reads a file of it.
            source: where it is, for messages.
            facts: what else the entry of the journal says.

        Raises:
            ResumeError: as :meth:`bring` does.
        """
        mine = [entry for entry in manifest.files if self.group.owner_in_group(entry.rank) == self.group.rank]
        with self._copying(name, manifest, **facts) as pending:
            write_copy(pending, manifest, mine, read, source)

    def receive(self, name: str, manifest: Manifest, nodes: Ranks) -> None:
        """Commit a copy of a checkpoint that other nodes send with :func:`send_missing`. One rank alone is to call it.

        Args:
            name: of the checkpoint.
            manifest: that of the original.
            nodes: the leaders of all nodes; those that send it begin together with this one.

        Raises:
            OSError, ResumeError: a file could not be written; or another node could not begin.
        """
        with self._copying(name, manifest, fetched_from="another node") as pending:
            run_on_all_ranks(nodes, pending.open, BEGIN_A_COPY)
            send_missing(self.storage, nodes, pending.place, set())
            _commit_copy(pending, manifest, manifest.files)

    @contextlib.contextmanager
    def _copying(self, name: str, manifest: Manifest, **facts: Any) -> Iterator[PendingCheckpoint]:
        """Return the context in which a copy is written and committed; it is announced at its end."""
        pending = PendingCheckpoint(
            self.storage,
            self.ranks,
            self.directory / name,
            manifest.step,
            self.fence,
            is_file=is_one_file(name, manifest),
            storage_group=shared_by_all(self.ranks),
        )
        try:
            yield pending
            if self.ranks.rank == 0:
                pending.announce(self.latest, self.journal.append, manifest, **facts)
                pending.set_replaced_aside()
        finally:
            pending.release()
        self.ranks.barrier()
