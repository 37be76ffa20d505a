"""Who finishes a save: the interface between a run, which writes a checkpoint, and the engine that commits it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from resume_adapters.core.checkpoint.commit import PendingCheckpoint
from resume_adapters.core.checkpoint.manifest import FileEntry, Manifest
from resume_adapters.core.staging.staging import StagedSave
from resume_adapters.core.storage.groups import StorageGroup
from resume_adapters.core.tiers.memory import MemoryTier


@dataclass(frozen=True)
class SaveRequest:
    """A checkpoint that all ranks have written and that is to be committed.

    Attributes:
        pending: the checkpoint.
        files: this rank's files, each after its path for the manifest.
        describe: makes the manifest; see :meth:`PendingCheckpoint.commit`.
        began: when the save began, by ``time.monotonic``.
        staged: what is still to be copied and written; ``None``: nothing.
        complete: writes what is known only once that is copied.
        is_best: it is the best checkpoint of the run so far.
        to_memory: it is in memory; where it must be dropped, it is not repeated.
        is_last: the run ends after it.
    """

    pending: PendingCheckpoint
    files: tuple[tuple[Path, Path], ...]
    describe: Callable[[tuple[FileEntry, ...]], Manifest]
    began: float
    staged: StagedSave | None = None
    complete: Callable[[], object] = bool
    is_best: bool = False
    to_memory: bool = False
    is_last: bool = False


class SaveEngine(Protocol):
    """Commits the checkpoints of one start of a run, one after the other, in the order of submission.

    Every rank has an engine and submits the same work to it in the same order. The engine may return before the work
    is done: it works on a channel of its own, and keeps an error until :meth:`drain`.
    """

    @property
    def last_submitted(self) -> int | None:
        """Step of the newest checkpoint that is committed or being committed."""

    @property
    def last_committed(self) -> int | None:
        """Step of the newest checkpoint that is committed."""

    def continue_from(self, step: int) -> None:
        """Count the checkpoint from which the run resumes as the last one committed."""

    def submit(self, request: SaveRequest) -> None:
        """Commit a checkpoint, then publish it and prune the run directory."""

    def submit_to_memory(self, memory: MemoryTier, request: SaveRequest) -> None:
        """Commit a checkpoint in memory; no ``latest`` names it, and nothing is pruned after it."""

    def submit_prune(self, group: StorageGroup, best: str | None) -> None:
        """Prune the run directory after the work submitted so far.

        Args:
            group: the ranks that share the run directory.
            best: name of the best checkpoint.
        """

    def drain(self) -> None:
        """Wait for the work submitted so far, and raise its first error, once.

        Raises:
            SaveFailed: this rank could not commit, publish or prune.
            PeerFailed: another rank could not.
            FencedOff: a later start owns the run directory.
        """

    def close(self) -> None:
        """Wait for the work submitted so far, then release threads and channels. Errors stay for :meth:`drain`."""
