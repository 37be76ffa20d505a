"""The operations that adapters call: open a run directory, begin, save, end a step, prune, stop, close.

A :class:`ResumableRun` is one start of a run directory, on all its ranks. It makes its collaborators, writes the
status, and leaves. How it starts is in :mod:`~resume_adapters.core.run.takeover`, how it saves in
:mod:`~resume_adapters.core.run.saver`, what it does at the end of a step in
:mod:`~resume_adapters.core.run.step_control`.
An error of a background commit is raised by the next :meth:`ResumableRun.save` or :meth:`ResumableRun.flush`, which
every rank calls at the same place.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from resume_adapters.core.checkpoint.catalog import Catalog
from resume_adapters.core.checkpoint.checkpoint import Checkpoint, ResumeChoice
from resume_adapters.core.checkpoint.latest import Pointer
from resume_adapters.core.checkpoint.parts import CheckpointReader
from resume_adapters.core.checkpoint.resolve import open_checkpoint
from resume_adapters.core.checkpoint.retention import KeepAll, Plan, Policy
from resume_adapters.core.checkpoint.validity import ForeignDetector, NoForeign
from resume_adapters.core.checkpoint.writer import CheckpointContent
from resume_adapters.core.choices import OnSaveError
from resume_adapters.core.ranks import Ranks, current_ranks
from resume_adapters.core.recovery.attempt import running_attempt
from resume_adapters.core.requirements import require_platform, require_type
from resume_adapters.core.run.messages import RunMessages
from resume_adapters.core.run.monitor import THREAD_NAME
from resume_adapters.core.run.ownership import Ownership
from resume_adapters.core.run.progress import Progress
from resume_adapters.core.run.saver import Saver
from resume_adapters.core.run.step_control import Decision, StepControl
from resume_adapters.core.run.takeover import Takeover
from resume_adapters.core.run_directory.control import ControlDirectory
from resume_adapters.core.run_directory.launches import WastedLaunch
from resume_adapters.core.run_directory.placeholder import Placeholder
from resume_adapters.core.run_directory.prune import Pruner
from resume_adapters.core.run_directory.publisher import StatusPublisher
from resume_adapters.core.run_directory.status import RunState, RunStatus
from resume_adapters.core.saving.cadence import Cadence, chosen
from resume_adapters.core.saving.engine import SaveEngine
from resume_adapters.core.saving.staging import Staging, StagingOptions
from resume_adapters.core.stop import slurm
from resume_adapters.core.stop.policy import StopOn, is_warning
from resume_adapters.core.stop.signals import StopFlag
from resume_adapters.core.storage.base import Storage
from resume_adapters.core.storage.groups import StorageGroup, shared_by_all
from resume_adapters.core.storage.local import LocalStorage
from resume_adapters.core.tiers.memory import MemoryTier
from resume_adapters.core.tiers.mirror import MIRROR_THREAD
from resume_adapters.core.tiers.mirrors import Mirrors
from resume_adapters.core.tiers.options import Memory, Mirror, Remote
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
        mirror: where committed checkpoints are copied to, beyond the run directory.
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
        mirror: Sequence[Mirror] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        require_platform()
        require_type("keep", keep, Policy, "KeepLast(3)")
        require_type("stop", stop, StopOn, "StopOn(exit_code=85)")
        self.directory = Path(os.path.abspath(run_directory))
        self.framework = framework
        self._made_ranks = ranks is None
        self.ranks = current_ranks() if ranks is None else ranks
        self.trace = open_trace(os.environ, self.ranks.rank, clock=clock, uncounted=(THREAD_NAME, MIRROR_THREAD))
        files: Storage = LocalStorage() if storage is None else storage
        self.storage = files if self.trace is None else self.trace.counting(files)
        attempt = running_attempt()
        self.resume = resume if attempt is None else attempt.resume_option(resume)
        self._attempt_checkpoint = None if attempt is None else attempt.memory(self.directory)
        self.foreign: ForeignDetector = NoForeign() if foreign is None else foreign
        self.latest = latest
        self.local_rank = local_rank
        self.clock = clock
        self.control = ControlDirectory(self.storage, self.directory, clock)
        self._undo_at_close = contextlib.ExitStack()
        self.resumed: Checkpoint | None = None
        self.previous: RunStatus | None = None
        self.wasted: tuple[WastedLaunch, ...] = ()
        """The launches before this one, one after the other, that made no progress; known after :meth:`open`."""
        self._messages = RunMessages(speaks=self.ranks.rank == 0)
        self._publisher = StatusPublisher(self.control.status, self.control.fencing, self._status)
        in_memory = next((each for each in mirror if isinstance(each, Memory)), None)
        self._step_control = StepControl(
            self.ranks,
            self.control,
            stop or StopOn(),
            cadence,
            self._publisher.refresh,
            self._messages,
            clock,
            None if in_memory is None else chosen(in_memory.save_every, in_memory.mtbf, to_memory=True),
        )
        former = None if attempt is None else attempt.former_flag(self.directory)
        self._goes_on = former is not None
        if former is not None:
            self.flag.continue_from(former)
        stores = [each for each in mirror if isinstance(each, Remote)]
        self._mirrors = Mirrors(stores, files, self.directory, self.control.journal, self.flag.request, clock)
        self._ownership = Ownership(self.control.fencing, self._mirrors, shared_by_all(self.ranks))
        self._memory_tier = (
            None
            if in_memory is None
            else MemoryTier(in_memory, files, os.geteuid(), self._ownership.require_on_node, clock)
        )
        self._staging = Staging(
            StagingOptions() if staging is None else staging,
            self.storage,
            int(os.environ.get("LOCAL_WORLD_SIZE", self.ranks.world_size)),
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
            fence=self._ownership.require,
            clock=clock,
            placeholder=self._placeholder,
            held=self._mirrors.held,
            observed=None if self.trace is None else self.trace.pruning,
        )
        self._saver = Saver(
            self.storage,
            self.directory,
            self.ranks,
            clock,
            framework=framework,
            on_save_error=on_save_error,
            latest=latest,
            journal=self.control.journal,
            pruner=self.pruner,
            ownership=self._ownership,
            step_control=self._step_control,
            staging=self._staging,
            mirrors=self._mirrors,
            memory_tier=self._memory_tier,
            messages=self._messages,
            trace=self.trace,
        )

    @property
    def flag(self) -> StopFlag:
        """The stop flag of this process."""
        return self._step_control.flag

    @property
    def storage_group(self) -> StorageGroup:
        """The ranks that share the run directory; known after :meth:`open`."""
        return self._ownership.storage_group

    @property
    def generation(self) -> int:
        """The number of this start of the run directory; 0 before :meth:`open`."""
        return self._ownership.generation

    @property
    def engine(self) -> SaveEngine:
        """What commits the checkpoints."""
        return self._saver.engine

    @property
    def attempt_checkpoint(self) -> Path | None:
        """The one in memory from which it goes on within a restartable block; ``None``: what is on the disk."""
        return None if self._attempt_checkpoint is None else Path(self._attempt_checkpoint.path)

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
        attempt = running_attempt()
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
            self._mirrors,
            self._memory_tier,
            self.local_rank,
            self._attempt_checkpoint,
            withdraws_stop=not self._goes_on,
        )
        try:
            choice = takeover.choose(require_usable)
        except BaseException:
            takeover.storage_group.close()
            self.close()
            raise
        self._ownership.begin(takeover.storage_group, takeover.generation)
        self.previous, self.wasted, self.resumed = takeover.previous, takeover.wasted, choice.checkpoint
        self._attempt_checkpoint = takeover.attempt_checkpoint
        if self._attempt_checkpoint is not None and attempt is not None:
            attempt.resumed(self.directory, self.generation)
        if choice.checkpoint is not None and self._attempt_checkpoint is None:
            self._saver.continue_from(choice.checkpoint)
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
        self._mirrors.start(self.generation)
        if self._memory_tier is not None:
            self._memory_tier.begin(self.ranks, self.resumed.step if self.resumed else 0)
        self._saver.begin(self.resumed)
        self.set_state(RunState.RUNNING, step=step, epoch=epoch)

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
        return self._saver.save(name, step, content, is_file=is_file, is_last=is_last)

    def copy_of(self, tensor: Any) -> Any:
        """Return the copy of a tensor in the save under way; ``None`` where it has none.

        Args:
            tensor: one that is not distributed.
        """
        return self._staging.copy_of(tensor)

    def write_elsewhere(
        self, path: Path, step: int, content: CheckpointContent, ranks: Ranks, group: StorageGroup, *, is_file: bool
    ) -> None:
        """Write a checkpoint outside of the run directory, and commit it there. The run may be closed.

        Args:
            path: the checkpoint; its parent directory belongs to the caller.
            step: optimizer steps completed.
            content: what the checkpoint is to hold.
            ranks: the ranks of the run, all of which call this.
            group: those that see the path that this rank sees. Each group gets the files of all ranks.
            is_file: the framework writes one file of that name, not a directory.
        """
        self._saver.write_elsewhere(path, step, content, ranks, group, is_file=is_file)

    def save_to_memory(self, name: str, step: int, content: CheckpointContent, *, is_file: bool = False) -> bool:
        """Write a checkpoint to memory alone, as :meth:`end_step` has said. Every rank calls it at the same step.

        What goes wrong there is said, and the training goes on.

        Args:
            name: name of the checkpoint.
            step: optimizer steps completed.
            content: what the checkpoint is to hold.
            is_file: the framework writes one file of that name, not a directory.

        Returns:
            Whether it is written.

        Raises:
            ResumeError: the commit before it failed, or a later start owns the run directory.
        """
        return self._saver.save_to_memory(name, step, content, is_file=is_file)

    def drain(self) -> None:
        """Wait for the commits in flight, and treat a failure as ``on_save_error`` says. Every rank calls it.

        Raises:
            ResumeError: a commit failed, and the run does not go on.
        """
        self._saver.drain()

    def flush(self) -> None:
        """Wait for the commits in flight, and raise their first error."""
        self.engine.drain()

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
        return self._step_control.end_step(step, epoch, horizon)

    def should_stop(self) -> bool:
        """Return whether all ranks save and leave now. Every rank calls it at the same places.

        For places within a step: between the batches of an evaluation.
        """
        return self._step_control.should_stop()

    def skip_batch(self) -> None:
        """Leave if this rank was asked to stop while it skips data that is already used. There is nothing to save.

        What is in memory alone is not left; see :meth:`end_skipping`. The other ranks learn of it by the stop file,
        since they may skip at another speed.

        Raises:
            Stopped: this rank was asked to stop.
        """
        if self._attempt_checkpoint is None and self._step_control.is_asked_alone():
            self.control.stop_file.request(self.flag.reason or "")
            self.end_skipping()

    def end_skipping(self) -> None:
        """Leave if any rank was asked to stop before its first step. Every rank calls it, once, at its first batch.

        Where it goes on from what is in memory alone, it does that step, saves, and leaves then.

        Raises:
            Stopped: a rank was asked to stop.
        """
        if self._step_control.agree_now() and self._attempt_checkpoint is None:
            progress = self._step_control.progress
            self.leave(progress.step, progress.epoch)

    def halt(self, reason: str) -> None:
        """Save, leave, and refuse to start again until a human has looked at the run.

        It takes effect when the ranks next poll for a stop. The next launch is refused with the reason, until
        ``resume-adapters stop --undo RUN_DIR`` clears it.

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
        self.finish_copies()
        if self.storage_group.is_leader:
            self.control.stop_file.withdraw()
        self.ranks.barrier()
        self.close()
        if self.flag.halted:
            self._messages.halted(step, reason, f"resume-adapters stop --undo {self.directory}")
            raise Halted(reason)
        self._messages.stopped(step, self._saver.newest)
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
            mirrors=[*self._mirrors.states, *(self._memory_tier.states if self._memory_tier is not None else [])],
        )

    def finish_copies(self) -> None:
        """Wait until the last checkpoint is copied to the tiers, as far as the walltime allows. Every rank calls it.

        Raises:
            FencedOff: a later start has claimed a tier.
        """
        self.flush()
        deadline = self._step_control.deadline
        self._mirrors.finish(deadline.at if deadline else None)
        if self._memory_tier is not None and (self.last_commit or 0) >= (self._memory_tier.step or 0):
            self._memory_tier.clear(self.ranks)
        if self._mirrors and self.storage_group.is_leader:
            self._publisher.repeat()
        self._mirrors.require_owned()

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
            if self._memory_tier is not None:
                undo.callback(self._memory_tier.group.close)
            undo.callback(self._staging.close)
            deadline = self._step_control.deadline
            undo.callback(self._mirrors.close, deadline.at if deadline else None)
            undo.callback(self._saver.close)
            undo.callback(self._step_control.close)
            undo.callback(self._undo_at_close.close)
        self.flush()
