"""What saves: a checkpoint is written to the run directory, to memory or elsewhere, and handed to who commits it."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from resume_adapters._version import __version__
from resume_adapters.core.checkpoint.checkpoint import Checkpoint
from resume_adapters.core.checkpoint.commit import PendingCheckpoint
from resume_adapters.core.checkpoint.latest import Pointer
from resume_adapters.core.checkpoint.manifest import FileEntry, Manifest, describe_cursor
from resume_adapters.core.checkpoint.share import share_files
from resume_adapters.core.checkpoint.workspace import Workspaces
from resume_adapters.core.checkpoint.writer import CheckpointContent, write_checkpoint
from resume_adapters.core.choices import OnSaveError
from resume_adapters.core.ranks import Ranks
from resume_adapters.core.run.messages import RunMessages
from resume_adapters.core.run.ownership import Ownership
from resume_adapters.core.run.step_control import StepControl
from resume_adapters.core.run_directory.journal import Journal
from resume_adapters.core.run_directory.prune import Pruner
from resume_adapters.core.run_directory.upkeep import set_aside, warn_if_short
from resume_adapters.core.saving.engine import SaveEngine, SaveRequest
from resume_adapters.core.saving.failures import SaveFailures
from resume_adapters.core.saving.staging import Staging
from resume_adapters.core.storage.base import Storage
from resume_adapters.core.storage.groups import StorageGroup
from resume_adapters.core.tiers.memory import MemoryTier
from resume_adapters.core.tiers.mirrors import Mirrors
from resume_adapters.core.trace.log import TraceLog
from resume_adapters.errors import ResumeError


class Saver:
    """Saves the checkpoints of one start of a run.

    Args:
        storage: the file operations.
        directory: the run directory.
        ranks: the ranks of the run.
        clock: returns seconds since 1970.
        framework: framework and version, for the manifests.
        on_save_error: what follows a save that fails.
        latest: how ``latest`` names the newest checkpoint.
        journal: the history of the run.
        pruner: removes what the policy does not keep.
        ownership: who owns the run directory.
        step_control: counts the saves.
        staging: how saves leave the training thread.
        mirrors: where committed checkpoints are copied to.
        memory_tier: the memory of this rank's node; ``None``: nothing is kept there.
        messages: says what is saved.
        trace: what is written of the run while it is watched; ``None``: it is not.

    Attributes:
        engine: commits what is written.
        newest: name of the checkpoint from which a launch would resume; ``None`` before there is one.
    """

    def __init__(
        self,
        storage: Storage,
        directory: Path,
        ranks: Ranks,
        clock: Callable[[], float],
        *,
        framework: str,
        on_save_error: OnSaveError,
        latest: Pointer,
        journal: Journal,
        pruner: Pruner,
        ownership: Ownership,
        step_control: StepControl,
        staging: Staging,
        mirrors: Mirrors,
        memory_tier: MemoryTier | None,
        messages: RunMessages,
        trace: TraceLog | None,
    ) -> None:
        self.newest: str | None = None
        self._storage = storage
        self._directory = directory
        self._ranks = ranks
        self._clock = clock
        self._framework = framework
        self._ownership = ownership
        self._step_control = step_control
        self._staging = staging
        self._mirrors = mirrors
        self._memory_tier = memory_tier
        self._messages = messages
        self._trace = trace
        self._workspaces = Workspaces(storage, directory)
        self._failures = SaveFailures(ranks, on_save_error)
        self._resumed: Path | None = None
        self._last_manifest: Manifest | None = None
        self.engine = SaveEngine(
            ranks.new_channel(),
            journal,
            pruner,
            latest=latest,
            on_committed=self._committed,
            staging=staging,
            memory=memory_tier,
        )

    # ---- Starting

    def continue_from(self, checkpoint: Checkpoint) -> None:
        """Count the checkpoint from which the run resumes as its newest one."""
        self.newest, self._resumed = checkpoint.path.name, checkpoint.path
        if checkpoint.manifest:
            self.engine.continue_from(checkpoint.step)

    def begin(self, resumed: Checkpoint | None) -> None:
        """Know how large a checkpoint is, and copy the one from which the run resumes to the tiers that lack it."""
        if resumed is None or resumed.manifest is None:
            return
        self._last_manifest = resumed.manifest
        self._warn_if_short(resumed.manifest)
        if resumed.path.parent == self._directory:
            self._mirrors.submit(resumed.path.name, resumed.manifest, may_be_there=True)

    def _warn_if_short(self, manifest: Manifest) -> None:
        if self._ownership.storage_group.is_leader:
            warn_if_short(self._storage, self._directory, manifest.bytes)

    # ---- To the run directory

    def save(
        self,
        name: str,
        step: int,
        content: CheckpointContent,
        *,
        is_file: bool,
        is_last: bool,
    ) -> bool:
        """Write a checkpoint and commit it in the background; see :meth:`ResumableRun.save`."""
        began = time.monotonic()
        self.drain()
        waited = time.monotonic() - began
        self._messages.waited(waited)

        def write() -> None:
            began = time.monotonic()
            self._write(name, step, content, began, is_file=is_file, is_last=is_last)
            self._step_control.saved(began - waited)

        def prune() -> None:
            self.engine.submit_prune(self._ownership.storage_group, None)
            self.engine.drain()

        is_written = self._failures.attempt(write, free_space=prune, is_last=is_last)
        if not is_written:
            self._step_control.save_failed()
        return is_written

    def _write(
        self,
        name: str,
        step: int,
        content: CheckpointContent,
        began: float,
        *,
        is_file: bool,
        is_last: bool,
    ) -> None:
        path = self._directory / name
        if self._trace is not None:
            self._trace.begin_save(name, step)
        if self._resumed == path:
            self._ranks.barrier()  # another rank may still be reading what this save moves aside
        pending = PendingCheckpoint(
            self._storage,
            self._ranks,
            path,
            step,
            self._ownership.require,
            functools.partial(set_aside, self._storage, fence=self._ownership.require),
            is_file=is_file,
            storage_group=self._ownership.storage_group,
            workspaces=self._workspaces,
        )
        self.engine.submit(self._written(pending, content, began, is_last=is_last))

    def _written(
        self,
        pending: PendingCheckpoint,
        content: CheckpointContent,
        began: float,
        *,
        is_last: bool = False,
        share: bool = False,
    ) -> SaveRequest:
        """Write a checkpoint, or copy it, and return what is still to be done for it.

        With ``share``, each group of ranks that share a directory gets the files of all, which are written at once.
        """
        try:
            pending.open()
            # Nothing is trained on behind the last save.
            copies = None if is_last or share else self._staging.copying
            written = write_checkpoint(pending, content, self._clock, copies, share_files if share else bool)
        except BaseException:  # also of a rank that is led out of an attempt
            pending.release()
            raise
        finally:
            copied = self._staging.end_save()
        group = self._ownership.storage_group
        part = group.members if group.is_partial else None
        manifest = functools.partial(self._manifest, step=pending.step, ranks=part, **written.facts)
        return SaveRequest(
            pending,
            tuple(written.files),
            manifest,
            began,
            copied,
            written.complete,
            is_last=is_last,
        )

    def _manifest(self, files: tuple[FileEntry, ...], **facts: Any) -> Manifest:
        return Manifest(
            world_size=self._ranks.world_size,
            generation=self._ownership.generation,
            files=files,
            package=__version__,
            framework=self._framework,
            **facts,
        )

    # ---- To memory, and elsewhere

    def save_to_memory(self, name: str, step: int, content: CheckpointContent, *, is_file: bool) -> bool:
        """Write a checkpoint to memory alone; see :meth:`ResumableRun.save_to_memory`."""
        began = time.monotonic()
        self.drain()
        memory = self._memory_tier
        assert memory is not None, "end_step has asked for it"
        is_written = False
        if memory.make_room(self._ranks, self._last_manifest):
            pending = memory.pending(self._ranks, name, step, is_file=is_file)
            try:
                request = self._written(pending, content, began, share=memory.group.is_partial)
                self.engine.submit_to_memory(memory, request)
                is_written = True
            except ResumeError as error:
                memory.failed(self._ranks, error)
        self._step_control.saved_to_memory(began, is_written=is_written)
        return is_written

    def write_elsewhere(
        self, path: Path, step: int, content: CheckpointContent, ranks: Ranks, group: StorageGroup, *, is_file: bool
    ) -> None:
        """Write a checkpoint outside of the run directory; see :meth:`ResumableRun.write_elsewhere`."""

        def nothing(*_: object) -> None:
            """Nobody else uses the directory."""

        pending = PendingCheckpoint(
            self._storage, ranks, path, step, nothing, nothing, is_file=is_file, storage_group=group
        )
        try:
            pending.open()
            written = write_checkpoint(pending, content, self._clock, share=share_files)
            written.complete()
            pending.commit(ranks, written.files, functools.partial(self._manifest, step=step, **written.facts))
            if pending.storage_group.is_leader:
                pending.complete()
        finally:
            pending.release()

    # ---- Waiting for the commits

    def drain(self) -> None:
        """Wait for the commits in flight, and treat a failure as ``on_save_error`` says; see :class:`ResumableRun`."""
        self._failures.attempt(self.engine.drain)

    def close(self) -> None:
        """Wait for the commits in flight, and undo what was made ahead of saves that do not come."""
        self.engine.close()
        self._workspaces.close()

    def _committed(self, name: str, manifest: Manifest, seconds: float) -> None:
        if self._trace is not None:
            self._trace.committed()
        self._step_control.committed(seconds)
        self._failures.committed()
        if self.newest is None:  # only now is a checkpoint's size known
            self._warn_if_short(manifest)
        self.newest, self._last_manifest = name, manifest
        self._mirrors.submit(name, manifest)
        self._messages.committed(name, describe_cursor(manifest.cursor))
