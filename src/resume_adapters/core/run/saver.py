"""What saves: a checkpoint is written to the run directory, to memory or elsewhere, and handed to who commits it."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from resume_adapters._version import __version__
from resume_adapters.core.checkpoint.checkpoint import Checkpoint
from resume_adapters.core.checkpoint.commit import PendingCheckpoint
from resume_adapters.core.checkpoint.layout import LONGEST_NAME
from resume_adapters.core.checkpoint.manifest import FileEntry, Manifest, describe_cursor
from resume_adapters.core.checkpoint.writer import CheckpointContent, write_checkpoint
from resume_adapters.core.choices import OnSaveError
from resume_adapters.core.log import logger
from resume_adapters.core.ranks import Ranks
from resume_adapters.core.run.context import RunContext
from resume_adapters.core.run.step_control import StepControl
from resume_adapters.core.run_directory.prune import Pruner
from resume_adapters.core.run_directory.upkeep import warn_if_short
from resume_adapters.core.saving.engine import SaveEngine, SaveRequest
from resume_adapters.core.saving.staging import Staging
from resume_adapters.core.storage.base import is_full
from resume_adapters.errors import PeerFailed, ResumeError, SaveFailed, UnsupportedSetting

_MOST = 3
"""Failed saves in a row that end a run in any case: it would train for nothing."""


class _Failure(NamedTuple):
    """A failed save, as all ranks know it: whether a later one may succeed, and whether a disk is full."""

    error: ResumeError
    may_pass: bool
    is_full: bool


class SaveFailures:
    """Decides, alike on all ranks, whether a run goes on after a save that failed.

    Args:
        on_save_error: what the user wants.

    Raises:
        UnsupportedSetting: it is neither ``"stop"`` nor ``"continue"``.
    """

    def __init__(self, ranks: Ranks, on_save_error: OnSaveError) -> None:
        if on_save_error not in ("stop", "continue"):
            raise UnsupportedSetting(f'on_save_error={on_save_error!r} is invalid: expected "stop" or "continue"')
        self._ranks = ranks
        self._continues = on_save_error == "continue"
        self._in_a_row = 0

    def committed(self) -> None:
        """Count a commit: failures before it no longer count."""
        self._in_a_row = 0

    def attempt(
        self,
        work: Callable[[], object],
        *,
        free_space: Callable[[], object] | None = None,
        is_last: bool = False,
    ) -> bool:
        """Save, or wait for a commit; return whether that succeeded. Every rank calls it at the same place.

        Args:
            work: raises on all ranks if it fails on one.
            free_space: removes what no policy keeps; where a disk is full, it is called before a second try.
            is_last: the run ends after it, so that no later save can make up for it.

        Raises:
            ResumeError: it failed, and the run does not go on.
        """
        failure = self._try(work)
        if failure is not None and failure.is_full and failure.may_pass and free_space is not None:
            pruning = self._try(free_space)
            failure = pruning if pruning is not None and not pruning.may_pass else self._try(work)
        if failure is None:
            return True
        self._in_a_row += 1
        is_over = self._in_a_row >= _MOST
        if not self._continues or is_last or is_over or not failure.may_pass:
            if self._continues and is_over and self._ranks.rank == 0:
                logger.error("%d saves in a row failed, so the run ends.", self._in_a_row)
            raise failure.error
        if self._ranks.rank == 0:
            logger.error(
                '%s. Training continues, as on_save_error="continue" says, and the next save tries again; after %d '
                "failures in a row the run ends (this is number %d).",
                str(failure.error).rstrip("."),
                _MOST,
                self._in_a_row,
            )
        return False

    def _try(self, work: Callable[[], object]) -> _Failure | None:
        try:
            work()
        except ResumeError as error:
            # What was fenced off, or holds an object that is not data, fails again.
            found = self._ranks.gather((isinstance(error, SaveFailed | PeerFailed), is_full(error)))
            return _Failure(error, all(may_pass for may_pass, _ in found), any(full for _, full in found))
        return None


class Saver:
    """Saves the checkpoints of one start of a run.

    Args:
        context: what the parts of the run have in common.
        pruner: removes what the policy does not keep.
        steps: counts the saves.

    Attributes:
        staging: how saves leave the training thread.
        engine: commits what is written.
        newest: name of the checkpoint from which a launch would resume; ``None`` before there is one.

    Raises:
        UnsupportedSetting: ``on_save_error`` is invalid.
    """

    def __init__(self, context: RunContext, pruner: Pruner, steps: StepControl) -> None:
        self.newest: str | None = None
        self._context = context
        self._pruner = pruner
        self._steps = steps
        self._failures = SaveFailures(context.ranks, context.options.on_save_error)
        self._resumed: Path | None = None
        self._last_manifest: Manifest | None = None
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", context.ranks.world_size))
        self.staging = Staging(context.options.staging, context.storage, ranks_here, context.messages.staging)
        self.engine = SaveEngine(
            context.ranks.new_channel(),
            context.control.journal,
            pruner,
            latest=context.options.latest,
            on_committed=self._committed,
            staging=self.staging,
            memory=context.memory,
        )

    # ---- Starting

    def continue_from(self, checkpoint: Checkpoint) -> None:
        """Count the checkpoint from which the run resumes as its newest one."""
        self.newest, self._resumed = checkpoint.path.name, checkpoint.path
        if checkpoint.manifest:
            self.engine.continue_from(checkpoint.step)

    def begin(self, resumed: Checkpoint | None) -> None:
        """Set the size of a checkpoint, and copy the one from which the run resumes to the tiers that lack it."""
        if resumed is None or resumed.manifest is None:
            return
        self._last_manifest = resumed.manifest
        self._warn_if_short(resumed.manifest)
        if resumed.path.parent == self._context.directory:
            self._context.mirrors.submit(resumed.path.name, resumed.manifest, may_be_there=True)

    def _warn_if_short(self, manifest: Manifest) -> None:
        if self._context.storage_group.is_leader:
            warn_if_short(self._context.storage, self._context.directory, manifest.bytes)

    # ---- To the run directory

    def save(
        self, name: str, step: int, content: CheckpointContent, *, is_file: bool = False, is_last: bool = False
    ) -> bool:
        """Write a checkpoint and commit it in the background. Every rank calls it at the same step.

        It first waits for the commit before it, and raises what went wrong there. Where the disk is full, the
        checkpoints that no policy keeps are removed, and it is tried once more.

        Args:
            name: name of the checkpoint in the run directory.
            is_file: the framework writes one file of that name, not a directory.
            is_last: the run ends after it: if it fails, that is raised.

        Returns:
            Whether it is written. ``False`` only with ``on_save_error="continue"``.

        Raises:
            UnsupportedSetting: the name is too long.
            SaveFailed: this rank could not write; nothing is committed.
            PeerFailed: another rank could not.
            FencedOff: a later start owns the run directory.
        """
        _require_short(name)
        context, path = self._context, self._context.directory / name
        began = time.monotonic()
        self.drain()
        waited = time.monotonic() - began
        context.messages.waited(waited)

        def write() -> None:
            began = time.monotonic()
            if context.trace is not None:
                context.trace.begin_save(name, step)
            if self._resumed == path:
                context.ranks.barrier()  # another rank may still be reading what this save moves aside
            pending = context.pending(path, step, context.ranks, context.storage_group, is_file=is_file)
            self.engine.submit(self._written(pending, content, began, is_last=is_last))
            self._steps.saved(began - waited)

        def prune() -> None:
            self.prune_later()
            self.engine.drain()

        is_written = self._failures.attempt(write, free_space=prune, is_last=is_last)
        if not is_written:
            self._steps.save_failed()
        return is_written

    def _written(
        self,
        pending: PendingCheckpoint,
        content: CheckpointContent,
        began: float,
        *,
        is_last: bool = False,
    ) -> SaveRequest:
        """Write a checkpoint, or copy it, and return what is still to be done for it."""
        try:
            # Nothing is trained on behind the last save, and what is sent to other nodes must be written.
            copies = None if is_last or pending.storage_group.shares else self.staging.copying
            written = write_checkpoint(pending, content, self._context.clock, copies)
        except BaseException:  # also of a rank that is led out of an attempt
            pending.release()
            raise
        finally:
            copied = self.staging.end_save()
        part = self._context.storage_group.part
        manifest = functools.partial(self._manifest, step=pending.step, ranks=part, **written.facts)
        return SaveRequest(pending, written, manifest, began, copied)

    def _manifest(self, files: tuple[FileEntry, ...], **facts: Any) -> Manifest:
        return Manifest(
            world_size=self._context.ranks.world_size,
            generation=self._context.generation,
            files=files,
            package=__version__,
            framework=self._context.options.framework,
            **facts,
        )

    # ---- To memory, and elsewhere

    def save_to_memory(self, name: str, step: int, content: CheckpointContent, *, is_file: bool = False) -> bool:
        """Write a checkpoint to memory alone, as :meth:`StepControl.end_step` has said. Every rank calls it.

        What goes wrong there is said, and the training goes on.

        Args:
            is_file: the framework writes one file of that name, not a directory.

        Returns:
            Whether it is written.

        Raises:
            ResumeError: the commit before it failed, or a later start owns the run directory.
        """
        began = time.monotonic()
        self.drain()
        memory, ranks = self._context.memory, self._context.ranks
        assert memory is not None, "end_step has asked for it"
        is_written = False
        if memory.make_room(ranks, self._last_manifest):
            pending = memory.pending(ranks, name, step, is_file=is_file)
            try:
                request = self._written(pending, content, began)
                self.engine.submit_to_memory(memory, request)
                is_written = True
            except ResumeError as error:
                memory.failed(ranks, error)
        self._steps.saved_to_memory(began, is_written=is_written)
        return is_written

    def write_now(
        self, pending: PendingCheckpoint, content: CheckpointContent, publish: Callable[[Manifest], object]
    ) -> None:
        """Write a checkpoint and commit it before this returns. The run may be closed.

        Args:
            pending: the checkpoint. Each group of ranks that share its directory gets the files of all.
            publish: completes it, on the leader of each group.
        """
        try:
            written = write_checkpoint(pending, content, self._context.clock)
            written.complete()
            describe = functools.partial(self._manifest, step=pending.step, **written.facts)
            manifest = pending.commit(pending.ranks, written.files, describe)
            if pending.storage_group.is_leader:
                publish(manifest)
        finally:
            pending.release()

    def copy_of(self, tensor: Any) -> Any:
        """Return the copy of a tensor that is not distributed in the save under way; ``None`` where it has none."""
        return self.staging.copy_of(tensor)

    # ---- Waiting for the commits

    def prune_later(self, *, best: str | None = None) -> None:
        """Remove the checkpoints that the policy does not keep, after the commits in flight. Every rank calls it.

        An error is raised as that of a commit is.

        Args:
            best: name of the best checkpoint.
        """
        self.engine.submit_prune(self._context.storage_group, best)

    def drain(self) -> None:
        """Wait for the commits in flight, and treat a failure as ``on_save_error`` says. Every rank calls it.

        Raises:
            ResumeError: a commit failed, and the run does not go on.
        """
        self._failures.attempt(self.engine.drain)

    def flush(self) -> None:
        """Wait for the commits in flight, and raise their first error."""
        self.engine.drain()

    def close(self) -> None:
        """Wait for the commits in flight."""
        self.engine.close()

    def _committed(self, name: str, manifest: Manifest, seconds: float) -> None:
        context = self._context
        if context.trace is not None:
            context.trace.committed()
        self._steps.committed(seconds)
        self._failures.committed()
        if self.newest is None:  # only now is a checkpoint's size known
            self._warn_if_short(manifest)
        self.newest, self._last_manifest = name, manifest
        context.mirrors.submit(name, manifest)
        context.messages.committed(name, describe_cursor(manifest.cursor))


def _require_short(name: str) -> None:
    """Refuse a name that could be saved and never removed.

    Raises:
        UnsupportedSetting: it is that long.
    """
    length = len(os.fsencode(name))
    if length > LONGEST_NAME:
        raise UnsupportedSetting(
            f"the name of a checkpoint has {length} bytes; expected at most {LONGEST_NAME}, or it could not be "
            f"removed: save it under a shorter name than {name[:60]!r}..."
        )
