"""The tier in memory: the newest two checkpoints of a run, on a file system in the memory of each node.

A directory there has what a run directory has: the same files, written by the same protocol, the manifest last. A
process that is killed leaves it as it is; a machine that restarts, or a container that is removed, does not. A start
fetches from it what is newer than the newest valid checkpoint of the run directory. Each node holds the files of its
own ranks, so what a rank has saved for itself is never another rank's.
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from resume_adapters.core.checkpoint import layout
from resume_adapters.core.checkpoint.commit import PendingCheckpoint
from resume_adapters.core.checkpoint.layout import CONTROL
from resume_adapters.core.checkpoint.manifest import FileEntry, Manifest
from resume_adapters.core.checkpoint.remove import Fence, delete_all
from resume_adapters.core.log import logger
from resume_adapters.core.ranks import SINGLE_PROCESS, Ranks, run_on_all_ranks
from resume_adapters.core.run_directory.discovery import ranks_by_directory
from resume_adapters.core.run_directory.status import MirrorStatus
from resume_adapters.core.storage.base import Bytes, Storage, read_pieces
from resume_adapters.core.storage.groups import StorageGroup, shared_by_some
from resume_adapters.core.storage.local import make_private_directory
from resume_adapters.core.tiers.copying import write_copy
from resume_adapters.core.tiers.held import HeldCheckpoints
from resume_adapters.core.tiers.options import Memory
from resume_adapters.core.tiers.tier import Tier, is_one_file
from resume_adapters.errors import (
    FencedOff,
    ResumeError,
    SaveFailed,
    UnsupportedSetting,
)

T = TypeVar("T")

_KEPT = 2
"""Checkpoints in memory: the newest, and the one before it while the newest is written."""

_SPARE = 1 << 20
"""Bytes beside those of the files: directories, manifests, what a file system rounds up to."""


Captured = Callable[[Path], Iterator[Bytes] | None]
"""Returns the content of a file as a save has captured it; ``None``: it has not."""


def _nothing(file: Path) -> None:
    """Nothing was captured."""


class MemoryTier:
    """The checkpoints of one run in the memory of this rank's node.

    Every method that every rank calls may be called on the thread that commits, or on another while that one waits.

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
    """

    def __init__(self, settings: Memory, storage: Storage, user: int, fence: Fence, clock: Callable[[], float]) -> None:
        self.directory = Path(settings.directory)
        self.group = StorageGroup(0, (0,), SINGLE_PROCESS)
        self.had_checkpoints = False
        self._settings = settings
        self._storage = storage
        self._user = user
        self._clock = clock
        self._held = HeldCheckpoints(storage, self.directory, fence, clock)
        self._fence = fence
        self._commits = 0
        self._step: int | None = None
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
        mount = Path(self._settings.directory)
        mine = mount / f"resume-adapters-{self._user}"
        self.directory = mine / identity

        def make() -> None:
            if not self._storage.is_directory(mount):
                raise UnsupportedSetting(
                    f"Memory: {mount} is not a directory; expected a file system in memory: mount one (tmpfs), or name "
                    'it: Memory(directory="...")',
                    path=mount,
                )
            for each in (mine, self.directory):
                make_private_directory(each)
            self._storage.make_directory(self.directory / CONTROL)

        def unusable(cause: Exception) -> ResumeError:
            reason = cause.strerror if isinstance(cause, OSError) else cause
            return UnsupportedSetting(f"Memory: {self.directory} cannot be used: {reason}", path=self.directory)

        run_on_all_ranks(ranks, make, "use the memory", unusable)
        seen = ranks_by_directory(self._storage, ranks, self.directory) if ranks.world_size > 1 else [(0,)]
        self.group = StorageGroup(ranks.rank, seen[ranks.rank], SINGLE_PROCESS)
        if self._settings.saves_alone and any(ranks.gather(self.group.members != group.members)):
            # One rank writes what all of them read, so the nodes send each other what they lack.
            self.group = shared_by_some(ranks, seen)
        self._held = HeldCheckpoints(self._storage, self.directory, self._fence, self._clock)
        self.had_checkpoints = any(
            run_on_all_ranks(ranks, lambda: bool(self._held.names()), "list the memory", unusable)
        )

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
            if not self.group.is_leader:
                return
            self._held.sweep()
            self.set_aside(step)

        _, problem = _on_all(ranks, tidy, "tidy the memory")
        if problem:
            self._turn_off(ranks, problem)

    def set_aside(self, after: int, before: int | None = None) -> None:
        """Remove the checkpoints whose step is later. The leaders of run directories call it.

        Args:
            after: the step; -1 for all of them.
            before: nothing here: what is in memory is older than a start that has not looked at it.
        """
        self._held.set_aside(after)

    @property
    def label(self) -> str:
        """Where it is."""
        return self._held.label

    @property
    def sources(self) -> list[Tier]:
        """What a resume may take a checkpoint from: this node's memory."""
        return [self._held]

    # ---- While the run trains

    @property
    def step(self) -> int | None:
        """The step of the newest checkpoint that this start has committed here."""
        return self._step

    @property
    def states(self) -> list[MirrorStatus]:
        """What ``status.json`` says of it."""
        return [MirrorStatus(tier=self._held.label, step=self._step, problem=self._problem)]

    def copy(self, ranks: Ranks, path: Path, manifest: Manifest, captured: Captured = _nothing) -> None:
        """Copy a committed checkpoint, if it is due. Every rank calls it for each commit, in order.

        What goes wrong is said once, and the training goes on: the run directory has the checkpoint.

        Args:
            ranks: the ranks of the run, on the channel of the calling thread.
            path: the checkpoint.
            manifest: what it contains.
            captured: returns the content of a file as the save has captured it, which is not read from the disk then.

        Raises:
            FencedOff: a later start owns the run directory.
        """
        is_due = self._commits % self._settings.every == 0
        self._commits += 1
        if manifest.step == self._step:  # saved to memory at the same step, before it was saved to the disk
            return
        if not is_due or not self.make_room(ranks, manifest):
            return
        pending = self.pending(ranks, path.name, manifest.step, is_file=is_one_file(path.name, manifest))
        try:
            mine = [entry for entry in manifest.files if entry.rank == ranks.rank]
            write_copy(pending, manifest, mine, functools.partial(self._read_committed, captured, path), str(path))
        except ResumeError as error:
            self.failed(ranks, error)
        else:
            self.committed(pending, manifest)

    def _read_committed(self, captured: Captured, path: Path, entry: FileEntry) -> Iterator[Bytes]:
        file = layout.locate(self._storage, path, entry.path)
        return captured(file) or read_pieces(self._storage, file)

    def pending(self, ranks: Ranks, name: str, step: int, *, is_file: bool) -> PendingCheckpoint:
        """Return a checkpoint that is to be written here. Every rank calls it."""
        return self._held.pending(ranks, name, step, is_file=is_file, group=self.group)

    def make_room(self, ranks: Ranks, last: Manifest | None) -> bool:
        """Remove all but the newest checkpoint, and return whether to write another one. Every rank calls it.

        Args:
            ranks: the ranks of the run, on the channel of the calling thread.
            last: the manifest of a checkpoint of the same run, which says how large one is; ``None`` if nobody knows.
        """
        if self._is_off:
            return False

        def look() -> str:
            if not self.group.is_leader:
                return ""
            newest = self._held.keep_newest()
            kept = 0 if newest is None else self._bytes_here(newest.manifest)
            needed = 0 if last is None else _KEPT * (self._bytes_here(last) + _SPARE)
            has = self._storage.free_bytes(self.directory) + kept
            return "" if needed <= has else self._too_small(has, needed)

        found, problem = _on_all(ranks, look, "look at the memory")
        problem = next(filter(None, found), problem)
        if problem:
            self._turn_off(ranks, problem)
        return not problem

    def _bytes_here(self, manifest: Manifest) -> int:
        return sum(entry.bytes for entry in manifest.files if self.group.is_partial or entry.rank in self.group.members)

    def _too_small(self, has: int, needed: int) -> str:
        gigabytes = -(-needed // 10**8) / 10
        return (
            f"{self._settings.directory} has {has / 1e6:,.0f} MB, and two checkpoints need {needed / 1e6:,.0f} MB; "
            f"give it {gigabytes:g} GB (Docker: --shm-size={gigabytes:g}g; Kubernetes: an emptyDir of medium Memory; "
            f"else: mount -o remount,size={gigabytes:g}G {self._settings.directory}), or leave out Memory()"
        )

    def committed(self, pending: PendingCheckpoint, manifest: Manifest) -> None:
        """Complete a checkpoint that is committed here. Every rank calls it."""
        self._step, self._problem = manifest.step, ""
        if not self.group.is_leader:
            return
        try:
            pending.complete()
        except FencedOff:
            raise
        except (ResumeError, OSError) as error:  # on the leader alone: the others have nothing to agree on with it
            self._problem = f"{pending.path} is whole, and could not be completed: {error}"
            logger.warning("%s. The training goes on: the next start completes it.", self._problem)

    def failed(self, ranks: Ranks, error: ResumeError) -> None:
        """Say what went wrong; where there is no room, nothing more is written here. Every rank calls it.

        Raises:
            FencedOff: that is what went wrong, on any rank.
        """
        _raise_if_fenced(ranks, error)
        is_full = isinstance(error, SaveFailed) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if any(ranks.gather(is_full)):
            self._turn_off(ranks, f"{error.message} (Memory: {self._settings.directory})")
            return
        if not self._problem and ranks.rank == 0:
            logger.warning("%s. The training goes on: the run directory is not concerned.", error.message)
        self._problem = error.message

    def _turn_off(self, ranks: Ranks, problem: str) -> None:
        self._is_off, self._problem = True, problem
        if ranks.rank == 0:
            logger.warning("nothing more is kept in memory by this launch: %s", problem)

    # ---- The end

    def clear(self, ranks: Ranks) -> None:
        """Give the memory back: what the run directory has is newer. Every rank calls it, and uses it no more.

        Args:
            ranks: the ranks of the run, on the channel of the calling thread.

        Raises:
            FencedOff: a later start owns the run directory.
        """
        self._is_off = True
        is_leader, is_there = self.group.is_leader, self._storage.is_directory
        _, problem = _on_all(
            ranks,
            lambda: (
                delete_all(self._storage, self.directory, self._fence)
                if is_leader and is_there(self.directory)
                else None
            ),
            "give the memory back",
        )
        if problem:
            self._problem = problem
            if ranks.rank == 0:
                logger.warning("%s. What is left is removed with rm -r %s.", problem, self.directory)


def _unusable(cause: Exception) -> ResumeError:
    return SaveFailed(f"the memory cannot be used: {cause}")


def _on_all(ranks: Ranks, work: Callable[[], T], doing: str) -> tuple[list[T], str]:
    """Run ``work`` on every rank; return all results, or none and the problem, on every rank.

    Raises:
        FencedOff: a later start owns the run directory; on a rank that has not found that, :class:`PeerFailed`.
    """
    try:
        return run_on_all_ranks(ranks, work, doing, _unusable), ""
    except ResumeError as error:
        _raise_if_fenced(ranks, error)
        return [], error.message


def _raise_if_fenced(ranks: Ranks, error: ResumeError) -> None:
    """Raise an error that all ranks have, each its own, if that of any is :class:`FencedOff`. Every rank calls it."""
    if any(ranks.gather(isinstance(error, FencedOff))):
        raise error
