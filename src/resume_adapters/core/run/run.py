"""The operations that adapters call: open a run directory, begin, save, end a step, prune, stop, close.

A :class:`ResumableRun` is one start of a run directory, on all its ranks. It holds no logic of its own: see
:mod:`~resume_adapters.core.run.takeover` for a start, :mod:`~resume_adapters.core.checkpoint.writer` and
:mod:`~resume_adapters.core.saving.background` for a save, :mod:`~resume_adapters.core.run.step_control` for the rest.
An error of a background commit is raised by the next :meth:`ResumableRun.save` or :meth:`ResumableRun.flush`, which
every rank calls at the same place.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from resume_adapters._version import __version__
from resume_adapters.core.checkpoint.catalog import Catalog
from resume_adapters.core.checkpoint.checkpoint import Checkpoint, ResumeChoice
from resume_adapters.core.checkpoint.commit import PendingCheckpoint
from resume_adapters.core.checkpoint.manifest import FileEntry, Manifest, describe_cursor
from resume_adapters.core.checkpoint.parts import CheckpointReader
from resume_adapters.core.checkpoint.resolve import open_checkpoint
from resume_adapters.core.checkpoint.retention import KeepAll, Plan, Policy
from resume_adapters.core.checkpoint.validity import ForeignDetector, NoForeign
from resume_adapters.core.checkpoint.writer import CheckpointContent, write_checkpoint
from resume_adapters.core.ranks import Ranks, current_ranks
from resume_adapters.core.requirements import require_platform, require_type
from resume_adapters.core.run.messages import RunMessages
from resume_adapters.core.run.monitor import THREAD_NAME
from resume_adapters.core.run.progress import Progress
from resume_adapters.core.run.step_control import Decision, StepControl
from resume_adapters.core.run.takeover import Takeover
from resume_adapters.core.run_directory.control import ControlDirectory
from resume_adapters.core.run_directory.launches import WastedLaunch
from resume_adapters.core.run_directory.placeholder import Placeholder
from resume_adapters.core.run_directory.prune import Pruner
from resume_adapters.core.run_directory.publisher import StatusPublisher
from resume_adapters.core.run_directory.room import warn_if_short
from resume_adapters.core.run_directory.status import RunState, RunStatus
from resume_adapters.core.run_directory.upkeep import set_aside
from resume_adapters.core.saving.background import ThreadSaveEngine
from resume_adapters.core.saving.cadence import Cadence
from resume_adapters.core.saving.engine import SaveEngine, SaveRequest
from resume_adapters.core.saving.failures import OnSaveError, SaveFailures
from resume_adapters.core.staging.staging import Staging, StagingOptions
from resume_adapters.core.stop import slurm
from resume_adapters.core.stop.policy import StopOn, is_warning
from resume_adapters.core.stop.signals import StopFlag
from resume_adapters.core.storage.base import Pointer, Storage
from resume_adapters.core.storage.groups import shared_by_all
from resume_adapters.core.storage.local import LocalStorage
from resume_adapters.core.trace.log import open_trace
from resume_adapters.errors import Halted, Stopped


class ResumableRun:
    """One start of a run directory.

    Args:
        run_directory: where the run's checkpoints are; created if it is missing.
        framework: framework and version, for the manifests.
        ranks: the ranks of the run, which the caller closes; by default those of ``torch.distributed``, which
            :meth:`close` closes.
        storage: the file operations; the local disk by default.
        resume: ``"auto"``, ``"scratch"``, ``"scratch!"`` or a path.
        keep: the retention policy; ``None`` keeps everything.
        stop: what asks the run to stop.
        cadence: when to save, for :meth:`end_step`; ``None`` where the framework decides that.
        on_save_error: ``"stop"``: a save that fails ends the run; ``"continue"``: training goes on, and the next save
            tries again.
        staging: how saves leave the training thread; by default they do not.
        foreign: recognises checkpoints that the bare framework wrote; none by default.
        latest: how ``latest`` names the newest checkpoint, so that the bare framework understands it.
        placeholder: name of an empty checkpoint that stands in the run directory until one is committed; ``None`` where
            the framework's scripts need none.
        local_rank: this rank on its node, if each node has its own run directory on a disk that others do not see;
            ``None`` if all ranks share one.
        clock: returns seconds since 1970.

    Attributes:
        trace: what is written of the run while it is watched; ``None`` where the environment asks for no trace.
    """

    def __init__(
        self,
        run_directory: str | os.PathLike[str],
        *,
        framework: str = "",
        ranks: Ranks | None = None,
        storage: Storage | None = None,
        resume: str | os.PathLike[str] = "auto",
        keep: Policy | None = None,
        stop: StopOn | None = None,
        cadence: Cadence | None = None,
        on_save_error: OnSaveError = "stop",
        staging: StagingOptions | None = None,
        foreign: ForeignDetector | None = None,
        latest: Pointer = "link",
        placeholder: str | None = None,
        local_rank: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        require_platform()
        require_type("keep", keep, Policy, "KeepLast(3)")
        require_type("stop", stop, StopOn, "StopOn(exit_code=85)")
        self.directory = Path(os.path.abspath(run_directory))
        self.framework = framework
        self._made_ranks = ranks is None
        self.ranks = current_ranks() if ranks is None else ranks
        self.trace = open_trace(os.environ, self.ranks.rank, clock=clock, uncounted=THREAD_NAME)
        files: Storage = LocalStorage() if storage is None else storage
        self.storage = files if self.trace is None else self.trace.counting(files)
        self.resume = resume
        self.foreign: ForeignDetector = NoForeign() if foreign is None else foreign
        self.latest = latest
        self.local_rank = local_rank
        self.storage_group = shared_by_all(self.ranks)
        """The ranks that share the run directory; known after :meth:`open`."""
        self.clock = clock
        self.control = ControlDirectory(self.storage, self.directory, clock)
        self._undo_at_close = contextlib.ExitStack()
        self.generation = 0
        self.resumed: Checkpoint | None = None
        self.previous: RunStatus | None = None
        self.wasted: tuple[WastedLaunch, ...] = ()
        """The launches before this one, one after the other, that made no progress; known after :meth:`open`."""
        self._newest: str | None = None
        self._messages = RunMessages(speaks=self.ranks.rank == 0)
        self._publisher = StatusPublisher(self.control.status, self.control.fencing, self._status)
        self._step_control = StepControl(
            self.ranks, self.control, stop or StopOn(), cadence, self._publisher.refresh, self._messages, clock
        )
        self._save_failures = SaveFailures(self.ranks, on_save_error)
        self._staging = Staging(
            StagingOptions() if staging is None else staging,
            self.storage,
            int(os.environ.get("LOCAL_WORLD_SIZE", self.ranks.world_size)),
            waited=self._step_control.waited,
            say=self._messages.staging,
        )
        self._catalog = Catalog(self.storage, self.directory)
        self._placeholder = Placeholder(self.storage, self.directory, placeholder)
        self.pruner = Pruner(
            self.storage,
            self._catalog,
            self.control.journal,
            self.control.leftovers,
            keep=KeepAll() if keep is None else keep,
            fence=self._fence,
            clock=clock,
            placeholder=self._placeholder,
            observed=None if self.trace is None else self.trace.pruning,
        )
        self.engine: SaveEngine = ThreadSaveEngine(
            self.ranks.new_channel(),
            self.control.journal,
            self.pruner,
            latest=latest,
            on_committed=self._committed,
            staging=self._staging,
            on_dropped=self._dropped,
        )

    @property
    def flag(self) -> StopFlag:
        """The stop flag of this process."""
        return self._step_control.flag

    @property
    def last_commit(self) -> int | None:
        """Step of the newest checkpoint that is committed or being committed."""
        return self.engine.last_submitted

    # ---- Starting

    def open(self, require_usable: Callable[[Checkpoint], object] = bool) -> ResumeChoice:
        """Take the run directory over and choose the checkpoint to resume from. Every rank calls it, once.

        Newer checkpoints that are not valid are set aside, and leftovers of crashed saves are removed. If it raises,
        the run is closed.

        Args:
            require_usable: raises :class:`CheckpointDamaged` where what this rank saved in a checkpoint cannot be used.

        Raises:
            RunDirectoryUnusable: it is not a directory, or not writable.
            NoValidCheckpoint: there are checkpoints, and none is valid.
            CheckpointsExist: ``resume="scratch"`` and there are committed checkpoints.
            StateMismatch: a node has a part of the checkpoint that its ranks did not save.
            UnsupportedSetting: ``local_rank`` is set, and nodes share the run directory.
        """
        takeover = Takeover(
            self.storage,
            self.ranks,
            self.directory,
            self.control,
            self.resume,
            self.foreign,
            self.latest,
            self._catalog,
            self._placeholder,
            self.local_rank,
        )
        try:
            choice = takeover.choose(require_usable)
        except BaseException:
            takeover.storage_group.close()
            self.close()
            raise
        self.storage_group, self.generation = takeover.storage_group, takeover.generation
        self.previous, self.wasted, self.resumed = takeover.previous, takeover.wasted, choice.checkpoint
        self._newest = choice.checkpoint.path.name if choice.checkpoint else None
        if choice.checkpoint and choice.checkpoint.manifest:
            self.engine.continue_from(choice.checkpoint.step)
        return choice

    def begin(self, step: int, epoch: float) -> None:
        """Begin to train: install the signal handlers, start the monitor, and set the state to running.

        Args:
            step: optimizer steps completed.
            epoch: epochs completed.

        Raises:
            UnsupportedSetting: a walltime in the environment is invalid.
        """
        self._step_control.begin(Progress(step, epoch), is_leader=self.storage_group.is_leader)
        if self.resumed and self.resumed.manifest:
            self._warn_if_short(self.resumed.manifest)
        self.set_state(RunState.RUNNING, step=step, epoch=epoch)

    def _warn_if_short(self, manifest: Manifest) -> None:
        if self.storage_group.is_leader:
            warn_if_short(self.storage, self.directory, manifest.bytes)

    # ---- Saving

    def save(
        self, name: str, step: int, content: CheckpointContent, *, is_file: bool = False, is_last: bool = False
    ) -> bool:
        """Write a checkpoint and commit it in the background. Every rank calls it at the same step.

        It first waits for the commit before it, and raises what went wrong there. Where the disk is full, the
        checkpoints that no policy keeps are removed, and it is tried once more.

        Args:
            name: name of the checkpoint in the run directory.
            step: optimizer steps completed.
            content: what the checkpoint is to hold.
            is_file: the framework writes one file of that name, not a directory.
            is_last: the run ends after it: if it fails, that is raised.

        Returns:
            Whether it is written. ``False`` only with ``on_save_error="continue"``.

        Raises:
            SaveFailed: this rank could not write; nothing is committed.
            PeerFailed: another rank could not.
            FencedOff: a later start owns the run directory.
        """
        began = time.monotonic()
        self.drain()
        waited = time.monotonic() - began
        self._messages.waited(waited)

        def write() -> None:
            began = time.monotonic()
            self._write(name, step, content, began, is_file=is_file, is_last=is_last)
            self._step_control.saved(began - waited)

        def prune() -> None:
            self.prune_later()
            self.flush()

        is_written = self._save_failures.attempt(write, free_space=prune, is_last=is_last)
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
        path = self.directory / name
        if self.trace is not None:
            self.trace.begin_save(name, step)
        if self.resumed is not None and self.resumed.path == path:
            self.ranks.barrier()  # another rank may still be reading what this save moves aside
        pending = PendingCheckpoint(
            self.storage,
            self.ranks,
            path,
            step,
            self._fence,
            functools.partial(set_aside, self.storage, fence=self._fence),
            is_file=is_file,
            storage_group=self.storage_group,
        )
        pending.open()
        try:
            # Nothing is trained on behind the last save.
            written = write_checkpoint(
                pending, content, self.clock, contextlib.nullcontext if is_last else self._staging.capturing
            )
        except BaseException:
            self._staging.discard()
            raise
        manifest = functools.partial(self._manifest, step=step, **written.facts)
        self.engine.submit(SaveRequest(pending, tuple(written.files), manifest, began, self._staging.take()))

    def _dropped(self, name: str, changed: list[str]) -> None:
        self._messages.dropped(name, changed)
        self._step_control.save_dropped()

    def _committed(self, name: str, manifest: Manifest, seconds: float) -> None:
        if self.trace is not None:
            self.trace.committed()
        self._step_control.committed(seconds)
        self._save_failures.committed()
        if self._newest is None:  # only now is a checkpoint's size known
            self._warn_if_short(manifest)
        self._newest = name
        self._messages.committed(name, describe_cursor(manifest.cursor))

    def _manifest(self, files: tuple[FileEntry, ...], **facts: Any) -> Manifest:
        return Manifest(
            world_size=self.ranks.world_size,
            generation=self.generation,
            files=files,
            package=__version__,
            framework=self.framework,
            ranks=self.storage_group.members if self.storage_group.is_partial else None,
            **facts,
        )

    def drain(self) -> None:
        """Wait for the commits in flight, and treat a failure as ``on_save_error`` says. Every rank calls it.

        Raises:
            ResumeError: a commit failed, and the run does not go on.
        """
        self._save_failures.attempt(self.flush)

    def flush(self) -> None:
        """Wait for the commits in flight, and raise their first error."""
        self.engine.drain()

    def _fence(self) -> None:
        self.control.fencing.require_owned(self.generation)

    # ---- Reading

    def reader(self, checkpoint: Checkpoint) -> CheckpointReader:
        """Return what reads the state that a checkpoint holds beside the framework's files, for this rank."""
        return CheckpointReader(self.storage, checkpoint, self.ranks.rank)

    def require_valid(self, path: Path) -> Checkpoint:
        """Verify the files of a committed checkpoint of this run, and return it.

        Raises:
            CheckpointDamaged: naming the file; only on the ranks that see the damage.
        """
        self.flush()
        return open_checkpoint(self.storage, path, self.foreign)

    # ---- Retention

    def prune(self, *, best: str | None = None) -> Plan:
        """Remove the checkpoints that the policy does not keep. The leaders of all run directories call it together.

        Returns:
            What is kept and what was removed, with reasons.
        """
        return self.pruner.prune(self.storage_group, best)

    def prune_later(self, *, best: str | None = None) -> None:
        """Remove the checkpoints that the policy does not keep, after the commits in flight. Every rank calls it.

        An error is raised as that of a commit is.
        """
        self.engine.submit_prune(self.storage_group, best)

    # ---- Steps, stopping and ending

    def end_step(self, step: int, epoch: float, horizon: int | None = None) -> Decision:
        """End an optimizer step, and return what all ranks do now: save, stop, or go on.

        Every rank calls it at the end of every step. A stop, and a save that is due by the clock, take effect one step
        later, so that no rank waits for the network.

        Args:
            step: optimizer steps completed.
            epoch: epochs completed, with the fraction of the current one.
            horizon: number of steps after which the run is finished, if known.
        """
        return self._step_control.end_step(Progress(step, epoch, horizon))

    def should_stop(self) -> bool:
        """Return whether all ranks save and leave now. Every rank calls it at the same places.

        For places within a step: between the batches of an evaluation.
        """
        return self._step_control.should_stop()

    def skip_batch(self) -> None:
        """Leave if this rank was asked to stop while it skips data that is already used. There is nothing to save.

        The other ranks learn of it by the stop file, since they may skip at another speed.

        Raises:
            Stopped: this rank was asked to stop.
        """
        if self._step_control.is_asked_alone():
            self.control.stop_file.request(self.flag.reason or "")
            self.end_skipping()

    def end_skipping(self) -> None:
        """Leave if any rank was asked to stop before its first step. Every rank calls it, once, at its first batch.

        Raises:
            Stopped: a rank was asked to stop.
        """
        if self._step_control.agree_now():
            progress = self._step_control.progress
            self.leave(progress.step, progress.epoch)

    def halt(self, reason: str) -> None:
        """Save, leave, and refuse to start again until a human has looked at the run.

        It takes effect when the ranks next poll for a stop. The next launch is refused with the reason, until
        ``resume-adapters unhalt RUN_DIR`` clears it.

        Args:
            reason: what the human should look at.
        """
        self.flag.halt(reason)

    def leave(self, step: int, epoch: float) -> None:
        """Wait for the commits in flight, set the state to stopped or halted, and leave the process.

        The second launch in a row that leaves for the walltime, and has kept no step, halts the run: its time limit is
        too short, and it would be queued again for ever.

        Raises:
            Stopped: always; a :class:`SystemExit` with the exit code of :class:`StopOn`.
            Halted: if the run was halted.
        """
        self.flush()
        start = self.resumed.step if self.resumed else 0
        has_progressed = (self.engine.last_committed or 0) > start
        reason = self._step_control.agree_on_reason(self.wasted, has_progressed=has_progressed)
        state = RunState.HALTED if self.flag.halted else RunState.STOPPED
        self.set_state(state, step=step, epoch=epoch, reason=reason)
        if self.storage_group.is_leader:
            self.control.stop_file.withdraw()
        self.ranks.barrier()
        self.close()
        if self.flag.halted:
            self._messages.halted(step, reason, f"resume-adapters unhalt {self.directory}")
            raise Halted(reason)
        self._messages.stopped(step, self._newest)
        job = slurm.job()
        if self.flag.on.requeue and self.ranks.rank == 0 and job is not None and is_warning(reason):
            slurm.requeue(job)
        raise Stopped(reason, self.flag.on.exit_code)

    def set_state(self, state: RunState, **facts: Any) -> None:
        """Write ``status.json``, on the leader of a run directory.

        If a later start owns the run directory, the status is that start's and stays.

        Args:
            state: the new state.
            facts: fields of :class:`RunStatus` that are known better than from the last
                step.
        """
        if self.storage_group.is_leader:
            self._publisher.set_state(state, facts)
        if self.trace is not None and state is not RunState.RUNNING:
            self.trace.write("end", state=state.value, step=facts.get("step"), reason=facts.get("reason"))

    def _status(self, state: RunState) -> RunStatus:
        status = self._step_control.status(state)
        return replace(
            status,
            generation=self.generation,
            last_commit=self.engine.last_committed,
            unremovable=len(self.control.leftovers),
            staging=self._staging.decision,
        )

    def undo_at_close(self, undo: Callable[[], object]) -> None:
        """Let :meth:`close` call a function first, which undoes what was patched for the run.

        A run closes itself where it is left or cannot be opened.
        """
        self._undo_at_close.callback(undo)

    def close(self) -> None:
        """Undo all that the run did to the process: signal handlers, threads and process groups.

        The run directory stays as it is. Closing a closed run does nothing.

        Raises:
            ResumeError: a commit in flight failed, and no call has raised that yet.
        """
        with contextlib.ExitStack() as undo:
            if self._made_ranks:
                undo.callback(self.ranks.close)
            undo.callback(self.storage_group.close)
            undo.callback(self._staging.close)
            undo.callback(self.engine.close)
            undo.callback(self._step_control.close)
            undo.callback(self._undo_at_close.close)
        self.flush()
