"""The tier in memory: the newest two checkpoints of a run, on a file system in the memory of each node.

It is a run directory: the same files, written by the same commit, the manifest last. A process that is killed leaves it
as it is; a machine that restarts, or a container that is removed, does not. A start fetches from it what is newer than
the newest valid checkpoint of the run directory on the disk. Each node holds the files of its own ranks, so what a rank
has saved for itself is never another rank's.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path

from resume_adapters.core.checkpoint.catalog import Catalog
from resume_adapters.core.checkpoint.commit import PendingCheckpoint
from resume_adapters.core.checkpoint.layout import CONTROL, locate, locator
from resume_adapters.core.checkpoint.manifest import FileEntry, Manifest
from resume_adapters.core.checkpoint.remove import Fence, delete, delete_all
from resume_adapters.core.checkpoint.validity import read_manifest
from resume_adapters.core.log import logger
from resume_adapters.core.ranks import SINGLE_PROCESS, Ranks, run_on_all_ranks
from resume_adapters.core.run_directory.control import ControlDirectory
from resume_adapters.core.run_directory.discovery import ranks_by_directory
from resume_adapters.core.run_directory.status import MirrorStatus
from resume_adapters.core.run_directory.upkeep import sweep
from resume_adapters.core.storage.base import Storage, read_pieces
from resume_adapters.core.storage.groups import StorageGroup, shared_by_some
from resume_adapters.core.storage.local import make_private_directory
from resume_adapters.core.tiers.options import Memory
from resume_adapters.core.tiers.tier import TierCheckpoint, is_one_file, reading, write_copy
from resume_adapters.errors import (
    CheckpointDamaged,
    FencedOff,
    FormatTooNew,
    ResumeError,
    SaveFailed,
    UnsupportedSetting,
)

_KEPT = 2
"""Checkpoints in memory: the newest, and the one before it while the newest is written."""

_SPARE = 1 << 20
"""Bytes beside those of the files: directories, manifests, what a file system rounds up to."""


class MemoryTier:
    """The checkpoints of one run in the memory of this rank's node: a :class:`~resume_adapters.core.tiers.tier.Tier`.

    What goes wrong here is said, and ends no run, but for a later start that owns the run directory. Every method that
    every rank calls may be called on the thread that commits, or on another while that one waits.

    Args:
        settings: what the user has set.
        storage: the file operations.
        user: the number of the user.
        fence: raises if a later start owns the run directory.
        clock: returns seconds since 1970.

    Attributes:
        directory: where the checkpoints are; known after :meth:`connect`.
        group: the ranks whose files are there; known after :meth:`connect`.
        had_checkpoints: this start has found some: the failure before it was one of processes.
        step: of the newest checkpoint that this start has committed here.
        unreadable: the checkpoints that :meth:`checkpoints` has found whose manifests cannot be used.
    """

    def __init__(self, settings: Memory, storage: Storage, user: int, fence: Fence, clock: Callable[[], float]) -> None:
        self.directory = Path(settings.directory, f"resume-adapters-{user}")
        self.group = StorageGroup(0, (0,), SINGLE_PROCESS)
        self.had_checkpoints = False
        self.step: int | None = None
        self.unreadable: list[str] = []
        self._settings = settings
        self._storage = storage
        self._fence = fence
        self._clock = clock
        self._commits = 0
        self._problem = ""
        self._is_off = False

    # ---- A start

    def connect(self, ranks: Ranks, group: StorageGroup, identity: str) -> None:
        """Make the directory, and find out which ranks share it. Every rank calls it.

        Args:
            ranks: the ranks of the run.
            group: those that share the run directory.
            identity: of the run.

        Raises:
            UnsupportedSetting: there is no such file system, or something else has the name of the directory.
        """
        mine, self.directory = self.directory, self.directory / identity

        def make() -> bool:
            if not self._storage.is_directory(mine.parent):
                raise UnsupportedSetting(
                    f"Memory: {mine.parent} is not a directory; expected a file system in memory: mount one (tmpfs), "
                    'or name it: Memory(directory="...")',
                    path=mine.parent,
                )
            for each in (mine, self.directory):
                make_private_directory(each)
            self._storage.make_directory(self.directory / CONTROL)
            return bool(Catalog(self._storage, self.directory).committed())

        def unusable(cause: Exception) -> ResumeError:
            reason = cause.strerror if isinstance(cause, OSError) else cause
            return UnsupportedSetting(f"Memory: {self.directory} cannot be used: {reason}", path=self.directory)

        self.had_checkpoints = any(run_on_all_ranks(ranks, make, "use the memory", unusable))
        seen = ranks_by_directory(self._storage, ranks, self.directory) if ranks.world_size > 1 else [(0,)]
        self.group = StorageGroup(ranks.rank, seen[ranks.rank], SINGLE_PROCESS)
        if self._settings.save_every is not None and any(
            ranks.gather(group.shares or self.group.members != group.members)
        ):
            # One rank writes what all of them read, so the nodes send each other what they lack.
            self.group = shared_by_some(ranks, seen)

    def begin(self, ranks: Ranks, step: int) -> None:
        """Remove what crashed saves have left, and checkpoints from which this start does not resume.

        Every rank calls it. Where that fails, nothing is kept in memory by this launch.

        Args:
            ranks: the ranks of the run, on the channel of the calling thread.
            step: the step from which this start resumes; 0 for a fresh start.

        Raises:
            FencedOff: a later start owns the run directory.
        """

        def tidy() -> None:
            control = ControlDirectory(self._storage, self.directory, self._clock)
            sweep(Catalog(self._storage, self.directory), control, self._fence)
            self.set_aside(step)

        self._on_leaders(ranks, tidy, "tidy the memory")

    # ---- What a resume asks

    @property
    def label(self) -> str:
        return str(self.directory)

    def checkpoints(self) -> list[TierCheckpoint]:
        found, self.unreadable = [], []
        for name in Catalog(self._storage, self.directory).committed():
            try:
                found.append(TierCheckpoint(name, name, read_manifest(self._storage, self.directory / name)))
            except (CheckpointDamaged, FormatTooNew) as error:
                logger.warning("%s/%s is not used: %s", self.label, name, error)
                self.unreadable.append(name)
        return sorted(found, key=lambda each: each.identity, reverse=True)

    def sizes(self, found: TierCheckpoint) -> dict[str, int]:
        place = locator(self._storage, self.directory / found.name)
        stamps = {entry.path: self._storage.stamp(place(entry.path)) for entry in self._files_here(found.manifest)}
        return {path: stamp.bytes for path, stamp in stamps.items() if stamp is not None}

    def read(self, found: TierCheckpoint, entry: FileEntry) -> Iterator[bytes]:
        file = locate(self._storage, self.directory / found.name, entry.path)
        if not self._storage.is_file(file):
            raise CheckpointDamaged(f"{file} is missing", path=file, step=found.manifest.step)
        return read_pieces(self._storage, file)

    def set_aside(self, after: int, before: int = 0) -> None:
        """Remove them: all are older than a start that has not looked at them, and nobody else has them."""
        self._remove(each.name for each in self.checkpoints() if each.manifest.step > after)

    def _remove(self, names: Iterator[str]) -> None:
        """Remove checkpoints, and those that cannot be used."""
        for name in (*names, *self.unreadable):
            delete(self._storage, self.directory / name, self._fence)

    # ---- While the run trains

    @property
    def states(self) -> list[MirrorStatus]:
        """What ``status.json`` says of it."""
        return [MirrorStatus(tier=self.label, step=self.step, problem=self._problem)]

    def copy(self, ranks: Ranks, path: Path, manifest: Manifest) -> None:
        """Copy a committed checkpoint, if it is due. Every rank calls it for each commit, in order.

        Args:
            ranks: the ranks of the run, on the channel of the calling thread.
            path: the checkpoint.
            manifest: what it contains.

        Raises:
            FencedOff: a later start owns the run directory.
        """
        is_due = self._commits % self._settings.every == 0
        self._commits += 1
        # One that was saved to memory at the same step is here, before it was saved to the disk.
        if not is_due or manifest.step == self.step or not self.make_room(ranks, manifest):
            return
        pending = self.pending(ranks, path.name, manifest.step, is_file=is_one_file(path.name, manifest))
        mine = [entry for entry in manifest.files if entry.rank == ranks.rank]
        try:
            write_copy(pending, manifest, mine, reading(self._storage, path), str(path))
        except ResumeError as error:
            self.failed(ranks, error)
        else:
            self.committed(ranks, pending, manifest)
        finally:
            pending.release()

    def pending(self, ranks: Ranks, name: str, step: int, *, is_file: bool) -> PendingCheckpoint:
        """Return a checkpoint that is to be written here. Every rank calls it."""
        return PendingCheckpoint(
            self._storage,
            ranks,
            self.directory / name,
            step,
            self._fence,
            is_file=is_file,
            storage_group=self.group,
            clear=delete,
        )

    def make_room(self, ranks: Ranks, last: Manifest | None) -> bool:
        """Remove all but the newest checkpoint, and return whether to write another one. Every rank calls it.

        Args:
            ranks: the ranks of the run, on the channel of the calling thread.
            last: the manifest of a checkpoint of the same run, which says how large one is; ``None`` if nobody knows.
        """
        return not self._is_off and self._on_leaders(ranks, lambda: self._make_room(last), "look at the memory")

    def _make_room(self, last: Manifest | None) -> None:
        found = self.checkpoints()
        self._remove(each.name for each in found[1:])
        needed = 0 if last is None else _KEPT * (self._bytes_here(last) + _SPARE)
        has = self._storage.free_bytes(self.directory) + sum(self._bytes_here(each.manifest) for each in found[:1])
        if has < needed:
            mount, gigabytes = self._settings.directory, -(-needed // 10**8) / 10
            raise SaveFailed(
                f"{mount} has {has / 1e6:,.0f} MB, and two checkpoints need {needed / 1e6:,.0f} MB; give it "
                f"{gigabytes:g} GB (Docker: --shm-size={gigabytes:g}g; Kubernetes: an emptyDir of medium Memory; else: "
                f"mount -o remount,size={gigabytes:g}G {mount}), or leave out Memory()"
            )

    def _bytes_here(self, manifest: Manifest) -> int:
        return sum(entry.bytes for entry in self._files_here(manifest))

    def _files_here(self, manifest: Manifest) -> Iterator[FileEntry]:
        return (each for each in manifest.files if self.group.is_partial or each.rank in self.group.members)

    def committed(self, ranks: Ranks, pending: PendingCheckpoint, manifest: Manifest) -> None:
        """Complete a checkpoint that is committed here. Every rank calls it.

        Raises:
            FencedOff: a later start owns the run directory; the checkpoint stays.
        """
        self.step, self._problem = manifest.step, ""
        self._on_leaders(ranks, pending.complete, f"complete {pending.path.name}")

    def failed(self, ranks: Ranks, error: ResumeError, *, is_final: bool = False) -> None:
        """Say what went wrong; where there is no room, nothing more is written here. Every rank calls it.

        Args:
            ranks: the ranks of the run, on the channel of the calling thread.
            error: what this rank has raised; that of another may be of another kind.
            is_final: nothing more is written in any case.

        Raises:
            FencedOff: that is what went wrong, on any rank; each raises its own error.
        """
        is_full = isinstance(error, SaveFailed) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        found = ranks.gather((isinstance(error, FencedOff), is_full))
        if any(is_fenced for is_fenced, _ in found):
            raise error
        self._is_off = is_final or any(is_full for _, is_full in found)
        if ranks.rank == 0 and self._is_off:
            logger.warning("nothing more is kept in memory by this launch (%s): %s", self.label, error.message)
        elif ranks.rank == 0 and not self._problem:
            logger.warning("%s. The training goes on: the run directory is not concerned.", error.message)
        self._problem = error.message

    def _on_leaders(self, ranks: Ranks, work: Callable[[], object], doing: str) -> bool:
        """Run ``work`` on the leader of each node; where it fails on any, write nothing more. Every rank calls it."""

        def unusable(cause: Exception) -> ResumeError:
            return SaveFailed(f"the memory cannot be used: {cause}")

        try:
            run_on_all_ranks(ranks, work if self.group.is_leader else bool, doing, unusable)
        except ResumeError as error:
            self.failed(ranks, error, is_final=True)
            return False
        return True

    # ---- The end

    def clear(self, ranks: Ranks) -> None:
        """Give the memory back: what the run directory has is newer. Every rank calls it, and uses it no more.

        Args:
            ranks: the ranks of the run, on the channel of the calling thread.

        Raises:
            FencedOff: a later start owns the run directory.
        """
        self._is_off = True

        def give_back() -> None:
            if self._storage.is_directory(self.directory):
                delete_all(self._storage, self.directory, self._fence)

        if not self._on_leaders(ranks, give_back, "give the memory back") and ranks.rank == 0:
            logger.warning("`rm -r %s` removes what is left.", self.directory)
