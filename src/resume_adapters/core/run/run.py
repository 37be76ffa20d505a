"""One start of a run directory: how it is opened, begun, left and closed.

A :class:`ResumableRun` makes the context and its parts, writes the status, and leaves. How it starts is in
:mod:`~resume_adapters.core.run.takeover`, how it saves in :mod:`~resume_adapters.core.run.saver`, what it does at the
end of a step in :mod:`~resume_adapters.core.run.step_control`; adapters call :attr:`ResumableRun.saver` and
:attr:`ResumableRun.steps`. An error of a background commit is raised by the next :meth:`Saver.save` or
:meth:`Saver.flush`, which every rank calls at the same place.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from resume_adapters.core.checkpoint.checkpoint import Checkpoint, ResumeChoice
from resume_adapters.core.checkpoint.parts import CheckpointReader
from resume_adapters.core.checkpoint.resolve import open_checkpoint
from resume_adapters.core.ranks import Ranks, current_ranks
from resume_adapters.core.recovery.attempt import running_attempt
from resume_adapters.core.requirements import require_platform
from resume_adapters.core.run.context import RunContext, RunOptions
from resume_adapters.core.run.saver import Saver
from resume_adapters.core.run.step_control import Progress, StepControl
from resume_adapters.core.run.takeover import Takeover
from resume_adapters.core.run_directory.launches import WastedLaunch
from resume_adapters.core.run_directory.prune import Pruner
from resume_adapters.core.run_directory.status import RunState, RunStatus, StatusPublisher, signed
from resume_adapters.core.stop.policy import is_warning
from resume_adapters.core.stop.walltime import slurm_job, slurm_requeue
from resume_adapters.core.storage.base import Storage
from resume_adapters.core.storage.groups import StorageGroup
from resume_adapters.core.storage.local import LocalStorage
from resume_adapters.errors import Halted, Stopped


class ResumableRun:
    """One start of a run directory.

    Args:
        run_directory: where the run's checkpoints are; created if it is missing.
        options: what was set.
        ranks: the ranks of the run, which the caller closes; by default those of ``torch.distributed``, which
            :meth:`close` closes.
        storage: the file operations; the local disk by default.
        clock: returns seconds since 1970.

    Attributes:
        context: what the parts of the run have in common.
        directory: the run directory.
        ranks: the ranks of the run.
        storage: the file operations.
        control: the ``.resume`` directory.
        flag: the stop flag of this process.
        trace: what is written of the run while it is watched; ``None`` where the environment asks for no trace.
        steps: decides at the end of each step: go on, save, or stop.
        pruner: applies the retention policy.
        saver: saves and commits.
        resumed: the checkpoint that it resumes from; ``None`` for a fresh start.
        previous: the status that the start before it left.
        wasted: the launches before this one, one after the other, that made no progress; known after :meth:`open`.
    """

    def __init__(
        self,
        run_directory: str | os.PathLike[str],
        options: RunOptions | None = None,
        *,
        ranks: Ranks | None = None,
        storage: Storage | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        require_platform()
        self._made_ranks = ranks is None
        self.ranks = current_ranks() if ranks is None else ranks
        files: Storage = LocalStorage() if storage is None else storage
        self.context = context = RunContext(run_directory, options or RunOptions(), self.ranks, files, clock)
        self.directory = context.directory
        self.storage = context.storage
        self.control = context.control
        self.flag = context.flag
        self.trace = context.trace
        self.resumed: Checkpoint | None = None
        self.previous: RunStatus | None = None
        self.wasted: tuple[WastedLaunch, ...] = ()
        attempt = running_attempt()
        self._attempt_checkpoint = None if attempt is None else attempt.memory(self.directory)
        former = None if attempt is None else attempt.former_flag(self.directory)
        self._goes_on = former is not None
        if former is not None:
            self.flag.continue_from(former)
        self._undo_at_close = contextlib.ExitStack()
        self._publisher = StatusPublisher(self.control.status, self.control.fencing.is_owned, self._status)
        self.steps = StepControl(context, self._publisher.refresh)
        self.pruner = Pruner(
            context.catalog,
            context.control,
            context.placeholder,
            keep=context.options.keep,
            fence=context.require_owned,
            held=context.mirrors.held,
            observed=None if self.trace is None else self.trace.pruning,
            weights=context.options.weights,
        )
        self.saver = Saver(context, self.pruner, self.steps)

    @property
    def storage_group(self) -> StorageGroup:
        """The ranks that share the run directory; known after :meth:`open`."""
        return self.context.storage_group

    @property
    def generation(self) -> int:
        """The number of this start of the run directory; 0 before :meth:`open`."""
        return self.context.generation

    @property
    def is_running(self) -> bool:
        """Whether this rank leads the run directory, and has said last that the run goes on."""
        return self._publisher.state is RunState.RUNNING

    @property
    def attempt_checkpoint(self) -> Path | None:
        """The one in memory from which it goes on within a restartable block; ``None``: what is on the disk."""
        return None if self._attempt_checkpoint is None else Path(self._attempt_checkpoint.path)

    @property
    def last_commit(self) -> int | None:
        """Step of the newest checkpoint that is committed or being committed."""
        return self.saver.engine.last_submitted

    # ---- Starting

    def open(self, require_usable: Callable[[Checkpoint], object] = bool) -> ResumeChoice:
        """Take the run directory over and choose the checkpoint to resume from. Every rank calls it, once.

        Newer checkpoints that are not valid are set aside, and leftovers of crashed saves are removed. If it raises,
        the run is closed. The state is running once the directory is taken over; a run that is closed before
        :meth:`begin` leaves the status as it was.

        Args:
            require_usable: raises :class:`CheckpointDamaged` where what this rank saved in a checkpoint cannot be used.

        Raises:
            RunDirectoryUnusable: it is not a directory, or not writable.
            NoValidCheckpoint: there are checkpoints, and none is valid.
            CheckpointsExist: ``resume="scratch"`` and there are committed checkpoints.
            StateMismatch: a node has a part of the checkpoint that its ranks did not save.
            UnsupportedSetting: the ranks of a node do not share the run directory, or nodes do in spite of a setting.
        """
        attempt = running_attempt()
        takeover = Takeover(self.context, self._publisher, self._attempt_checkpoint, withdraws_stop=not self._goes_on)
        try:
            choice = takeover.choose(require_usable)
        except BaseException:
            takeover.storage_group.close()
            self.close()
            raise
        self.context.own(takeover.storage_group, takeover.generation)
        if self.storage_group.shares:
            self.saver.staging.switch_off("only what is written is sent to the other nodes")
        self.previous, self.wasted, self.resumed = takeover.previous, takeover.wasted, choice.checkpoint
        self._attempt_checkpoint = takeover.attempt_checkpoint
        if self._attempt_checkpoint is not None and attempt is not None:
            attempt.resumed(self.directory, self.generation)
        if choice.checkpoint is not None and self._attempt_checkpoint is None:
            self.saver.continue_from(choice.checkpoint)
        return choice

    def begin(self, step: int, epoch: float) -> None:
        """Begin to train: install the signal handlers, start the monitor, and set the state to running.

        Raises:
            UnsupportedSetting: a walltime in the environment is invalid.
        """
        self.steps.begin(Progress(step, epoch), is_leader=self.storage_group.is_leader)
        self.context.mirrors.start(self.generation)
        if self.context.memory is not None:
            self.context.memory.begin(self.ranks, self.resumed.step if self.resumed else 0)
        self.saver.begin(self.resumed)
        self.set_state(RunState.RUNNING, step=step, epoch=epoch)

    # ---- Reading

    def reader(self, checkpoint: Checkpoint) -> CheckpointReader:
        """Return what reads the state that a checkpoint holds beside the framework's files, for this rank."""
        return CheckpointReader(self.storage, checkpoint, self.ranks.rank)

    def require_valid(self, path: Path) -> Checkpoint:
        """Verify the files of a committed checkpoint of this run, whose weights are to be loaded, and return it.

        Raises:
            CheckpointDamaged: naming the file; only on the ranks that see the damage.
        """
        self.saver.flush()
        return open_checkpoint(self.storage, path, self.context.options.foreign, for_weights=True)

    # ---- Stopping and ending

    def skip_batch(self) -> None:
        """Leave if this rank was asked to stop while it skips data that is already used. There is nothing to save.

        What is in memory alone is not left; see :meth:`end_skipping`. The other ranks learn of it by the stop file,
        since they may skip at another speed.

        Raises:
            Stopped: this rank was asked to stop.
        """
        if self._attempt_checkpoint is None and self.steps.is_asked_alone():
            if self._means_this_start():
                self.control.stop_file.request(self.flag.reason or "")
            self.end_skipping()

    def end_skipping(self) -> None:
        """Leave if any rank was asked to stop before its first step. Every rank calls it, once, at its first batch.

        Where it goes on from what is in memory alone, it does that step, saves, and leaves then.

        Raises:
            Stopped: a rank was asked to stop.
        """
        if self.steps.agree_now() and self._attempt_checkpoint is None:
            progress = self.steps.progress
            self.leave(progress.step, progress.epoch)

    def leave(self, step: int, epoch: float) -> None:
        """Wait for the commits in flight, set the state to stopped or halted, and leave the process.

        The second launch in a row that leaves for the walltime, and has kept no step, halts the run: its time limit is
        too short, and it would be queued again for ever.

        Raises:
            Stopped: always; a :class:`SystemExit` with the exit code of :class:`StopOn`.
            Halted: if the run was halted.
        """
        self.saver.flush()
        start = self.resumed.step if self.resumed else 0
        has_progressed = (self.saver.engine.last_committed or 0) > start
        reason = self.steps.agree_on_reason(self.wasted, has_progressed=has_progressed)
        state = RunState.HALTED if self.flag.halted else RunState.STOPPED
        self.set_state(state, step=step, epoch=epoch, reason=reason)
        self.finish_copies()
        if self.storage_group.is_leader and self._means_this_start():
            self.control.stop_file.withdraw()
        self.ranks.barrier()
        self.close()
        if self.flag.halted:
            self.context.messages.halted(step, reason, f"resume-adapters stop --undo {self.directory}")
            raise Halted(reason)
        self.context.messages.stopped(step, self.saver.newest)
        job = slurm_job()
        if self.flag.on.requeue and self.ranks.rank == 0 and job is not None and is_warning(reason):
            slurm_requeue(job)
        raise Stopped(reason, self.flag.on.exit_code)

    def _means_this_start(self) -> bool:
        """Return whether a stop file is for this start, and not for a later one that has taken over."""
        return self.control.fencing.generation() == self.generation

    def set_state(self, state: RunState, **facts: Any) -> None:
        """Write ``status.json``, on the leader of a run directory.

        If a later start owns the run directory, the status is that start's and stays.

        Args:
            facts: fields of :class:`RunStatus` that are known better than from the last
                step.
        """
        if self.storage_group.is_leader:
            self._publisher.set_state(state, facts)
        if self.trace is not None and state is not RunState.RUNNING:
            self.trace.write("end", state=state.value, step=facts.get("step"), reason=facts.get("reason"))

    def _status(self, state: RunState) -> RunStatus:
        status = self.steps.status(state)
        described = replace(
            status,
            generation=self.generation,
            last_commit=self.saver.engine.last_committed,
            unremovable=len(self.control.leftovers),
            staging=self.saver.staging.decision,
            mirrors=[
                *self.context.mirrors.states,
                *(self.context.memory.states if self.context.memory is not None else []),
            ],
        )
        return signed(described, self.context.clock())

    def finish_copies(self) -> None:
        """Wait until the last checkpoint is copied to the tiers, as far as the walltime allows. Every rank calls it.

        Raises:
            FencedOff: a later start has claimed a tier.
        """
        self.saver.flush()
        deadline = self.steps.deadline
        self.context.mirrors.finish(deadline.at if deadline else None)
        if self.context.memory is not None and (self.last_commit or 0) >= (self.context.memory.step or 0):
            self.context.memory.clear(self.ranks)
        if self.context.mirrors.tiers and self.storage_group.is_leader:
            self._publisher.repeat()
        self.context.mirrors.require_owned()

    def undo_at_close(self, undo: Callable[[], object]) -> None:
        """Call a function at the beginning of :meth:`close`, which undoes what was patched for the run.

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
            if self.context.memory is not None:
                undo.callback(self.context.memory.group.close)
            undo.callback(self.saver.staging.close)
            deadline = self.steps.deadline
            undo.callback(self.context.mirrors.close, deadline.at if deadline else None)
            undo.callback(self.saver.close)
            undo.callback(self.steps.close)
            undo.callback(self._undo_at_close.close)
            undo.callback(self._publisher.restore)
        self.saver.flush()
