"""The verbs that adapters call: open a run directory, begin and commit checkpoints, prune, stop.

One :class:`ResumableRun` is one start of a run directory, on all its ranks. Commits run on a background thread with a
channel of their own; an error there is raised by the next :meth:`ResumableRun.save` or :meth:`ResumableRun.flush`,
which every rank calls at the same place.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from resume_adapters._version import __version__
from resume_adapters.core.checkpoint.checkpoint import Checkpoint, ResumeChoice
from resume_adapters.core.checkpoint.commit import PendingCheckpoint
from resume_adapters.core.checkpoint.manifest import FileEntry, Manifest
from resume_adapters.core.checkpoint.parts import CheckpointReader
from resume_adapters.core.checkpoint.resolve import open_checkpoint
from resume_adapters.core.checkpoint.retention import KeepAll, Plan, Policy
from resume_adapters.core.checkpoint.validity import ForeignDetector
from resume_adapters.core.checkpoint.writer import write_checkpoint
from resume_adapters.core.ranks import Ranks, current_ranks
from resume_adapters.core.requirements import require_type
from resume_adapters.core.run.progress import Progress
from resume_adapters.core.run.step_control import Decision, StepControl
from resume_adapters.core.run.takeover import Takeover
from resume_adapters.core.run_directory.control import ControlDirectory
from resume_adapters.core.run_directory.publisher import StatusPublisher
from resume_adapters.core.run_directory.status import RunStatus
from resume_adapters.core.run_directory.upkeep import set_aside
from resume_adapters.core.saving.background import ThreadSaveEngine
from resume_adapters.core.saving.cadence import Cadence
from resume_adapters.core.state.stateful import Stateful
from resume_adapters.core.stop import slurm
from resume_adapters.core.stop.policy import StopOn, is_warning
from resume_adapters.core.stop.signals import StopFlag
from resume_adapters.core.stop.vote import common_reason
from resume_adapters.core.storage.base import Pointer, Storage
from resume_adapters.core.storage.groups import shared_by_all
from resume_adapters.core.storage.local import LocalStorage
from resume_adapters.errors import Halted, Stopped


def no_foreign(path: Path) -> int | None:
    """Know no checkpoints but this package's own."""
    return None


class ResumableRun:
    """One start of a run directory.

    Args:
        run_directory: where the run's checkpoints live; made where it is missing.
        framework: framework and version, for the manifests.
        ranks: the ranks of the run; those of ``torch.distributed`` by default.
        storage: the file operations; the local disk by default.
        resume: ``"auto"``, ``"scratch"``, ``"scratch!"`` or a path.
        keep: the retention policy; ``None`` keeps everything.
        stop: what asks the run to stop.
        cadence: when to save, for :meth:`end_step`; ``None`` where the framework decides that.
        foreign: recognises whole checkpoints that this package did not write.
        latest: how ``latest`` names the newest checkpoint, so that the bare framework understands it.
        local_rank: this rank on its node, where each node has a run directory of its own, on a disk that others do not
            see; ``None`` where all ranks share one.
        clock: returns seconds since 1970.
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
        foreign: ForeignDetector = no_foreign,
        latest: Pointer = "link",
        local_rank: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        require_type("keep", keep, Policy, "KeepLast(3)")
        require_type("stop", stop, StopOn, "StopOn(exit_code=85)")
        self.directory = Path(os.path.abspath(run_directory))
        self.framework = framework
        self.ranks = current_ranks() if ranks is None else ranks
        self.storage: Storage = LocalStorage() if storage is None else storage
        self.resume = resume
        self.foreign = foreign
        self.latest = latest
        self.local_rank = local_rank
        self.sharing = shared_by_all(self.ranks)
        """Which ranks share the run directory; known once it is open."""
        self.clock = clock
        self.control = ControlDirectory(self.storage, self.directory, clock)
        self.generation = 0
        self.resumed: Checkpoint | None = None
        self.previous: RunStatus | None = None
        self._live = StatusPublisher(self.control.status, self.control.fencing, self._status)
        self._lifecycle = StepControl(self.ranks, self.control, stop or StopOn(), cadence, self._live.refresh, clock)
        self.committer = ThreadSaveEngine(
            self.storage,
            self.ranks.twin(),
            self.directory,
            self.control.journal,
            keep=KeepAll() if keep is None else keep,
            latest=latest,
            fence=self._fence,
            tell=self._lifecycle.committed,
            clock=clock,
        )

    @property
    def flag(self) -> StopFlag:
        """The flag that asks this process to stop."""
        return self._lifecycle.flag

    @property
    def last_commit(self) -> int | None:
        """Step of the newest checkpoint that is committed or being committed."""
        return self.committer.last

    # ---- Starting

    def open(self) -> ResumeChoice:
        """Take the run directory over and choose what to resume from. Every rank calls it, once.

        Newer checkpoints that were rejected are set aside, and what crashed saves left is removed.

        Raises:
            RunDirectoryUnusable: not a directory, or not writable.
            NoValidCheckpoint: there are checkpoints, and none is valid.
            CheckpointsExist: ``resume="scratch"`` and there are committed checkpoints.
            StateMismatch: a node has a part of the checkpoint that is not of its ranks.
            UnsupportedSetting: the run directory was said to be each node's own, and is not.
        """
        start = Takeover(
            self.storage,
            self.ranks,
            self.directory,
            self.control,
            self.resume,
            self.foreign,
            self.latest,
            self.local_rank,
        )
        choice = start.choose()
        self.sharing, self.generation, self.previous = start.sharing, start.generation, start.previous
        self.resumed = choice.checkpoint
        if choice.checkpoint and choice.checkpoint.manifest:
            self.committer.last = self.committer.committed = choice.checkpoint.step
        return choice

    def begin(self, step: int, epoch: float) -> None:
        """Begin to train: take the signals over, look once a second for what asks for a stop, keep the status live.

        Args:
            step: optimizer steps completed.
            epoch: epochs completed.

        Raises:
            UnsupportedSetting: a walltime in the environment is written in a way that is not understood.
        """
        self._lifecycle.begin(Progress(step, epoch), leads=self.sharing.leads)
        self.record("running", step=step, epoch=epoch)

    # ---- Saving

    def save(
        self,
        name: str,
        step: int,
        *,
        native: Callable[[], object],
        own: Callable[[], Any],
        parts: Mapping[str, Stateful],
        owner: Callable[[Path], int],
        facts: Callable[[], dict[str, Any]],
        best: str | None = None,
        is_file: bool = False,
    ) -> None:
        """Write a checkpoint and commit it in the background. Every rank calls it at the same step.

        It first waits for the commit before it, and raises what went wrong there.

        Args:
            name: name of the checkpoint in the run directory.
            step: optimizer steps completed.
            native: lets the framework write its own files.
            own: returns what belongs to this rank alone (random state, position, running sums); called after
                ``native``, so that random numbers drawn by the save itself are accounted for.
            parts: what may be alike on all ranks.
            owner: the rank that answers for a file of the framework.
            facts: fields of :class:`Manifest` that the adapter knows; called last.
            best: name of the best checkpoint, which retention keeps.
            is_file: the framework writes one file of that name, not a directory.

        Raises:
            SaveFailed: this rank could not write; nothing is committed.
            PeerFailed: another rank could not.
            FencedOff: a later start owns the run directory.
        """
        began = time.monotonic()
        self.flush()
        path = self.directory / name
        if self.resumed is not None and self.resumed.path == path:
            self.ranks.barrier()  # another rank may still be reading what this save moves aside
        pending = PendingCheckpoint(
            self.storage, self.ranks, path, step, self._fence, is_file=is_file, sharing=self.sharing
        )
        pending.open(functools.partial(set_aside, self.storage))
        files, described = write_checkpoint(
            pending, native=native, own=own, parts=parts, owner=owner, facts=facts, clock=self.clock
        )
        manifest = functools.partial(self._manifest, step=step, best=best, **described)
        self.committer.commit(pending, files, manifest, began)
        self._lifecycle.saved(began)

    def _manifest(self, files: tuple[FileEntry, ...], **facts: Any) -> Manifest:
        return Manifest(
            world_size=self.ranks.world_size,
            generation=self.generation,
            files=files,
            package=__version__,
            framework=self.framework,
            ranks=self.sharing.members if self.sharing.is_partial else None,
            **facts,
        )

    def flush(self) -> None:
        """Wait for the commit that is under way, and raise what it raised."""
        self.committer.flush()

    def _fence(self) -> None:
        self.control.fencing.require_owned(self.generation)

    # ---- Reading

    def saved(self, checkpoint: Checkpoint) -> CheckpointReader:
        """Return the parts of the state that a checkpoint holds, for this rank to read."""
        return CheckpointReader(self.storage, checkpoint, self.ranks.rank)

    def require_valid(self, path: Path) -> None:
        """Check a committed checkpoint of this run before something is read from it other than by a resume.

        Raises:
            CheckpointDamaged: naming the file; on the rank that answers for it, and nowhere else.
        """
        self.flush()
        open_checkpoint(self.storage, path, self.foreign)

    # ---- Retention

    def prune(self, *, best: str | None = None) -> Plan:
        """Remove what the policy does not keep. Those who lead run directories call it, together.

        Returns:
            What it kept and removed.
        """
        return self.committer.prune(self.sharing, best)

    def prune_later(self, *, best: str | None = None) -> None:
        """Remove what the policy does not keep once the commits under way are done. Every rank calls it.

        What goes wrong is raised as that of a commit is.
        """
        self.committer.prune_later(self.sharing, best)

    # ---- Going on, stopping and ending

    def end_step(self, step: int, epoch: float, horizon: int | None = None) -> Decision:
        """Note that an optimizer step was completed, and return what all ranks do now: save, or stop, or go on.

        Every rank calls it at the end of every step. A save that is due by the clock, and a stop, are decided one step
        behind: nobody waits for the network.

        Args:
            step: optimizer steps completed.
            epoch: epochs completed, with the fraction of the running one.
            horizon: steps after which the run is finished, where that is known.
        """
        return self._lifecycle.end_step(Progress(step, epoch, horizon))

    def should_stop(self) -> bool:
        """Return whether all ranks are to save and leave now. Every rank asks at the same places.

        For places between two ends of a step: between the batches of an evaluation.
        """
        return self._lifecycle.should_stop()

    def skip_batch(self) -> None:
        """Leave if this rank was asked to stop, while it reads through data that was used already.

        There is nothing to save. The other ranks hear of it from the stop file, since they may read at another speed.

        Raises:
            Stopped: it was asked.
        """
        if self._lifecycle.is_asked_alone():
            self.control.stop_file.request(self.flag.reason or "")
            self.end_skipping()

    def end_skipping(self) -> None:
        """Leave if any rank was asked to stop before its first step. Every rank calls it, once, at its first batch.

        Raises:
            Stopped: one was asked.
        """
        if self._lifecycle.settle():
            self.leave(self._lifecycle.progress.step, self._lifecycle.progress.epoch)

    def halt(self, reason: str) -> None:
        """Ask for a stop that a human must look at: save, leave, and refuse to start again.

        It takes effect where the ranks next ask whether to stop. The next launch is refused with the reason, until
        ``resume-adapters resume RUN_DIR`` clears it.

        Args:
            reason: what the human is to look at.
        """
        self.flag.halt(reason)

    def leave(self, step: int, epoch: float) -> None:
        """Flush, record the stop and leave the process.

        Raises:
            Stopped: always; a :class:`SystemExit` with the exit code of :class:`StopOn`.
            Halted: where the run was halted.
        """
        self.flush()
        self._lifecycle.settle()
        reason = common_reason(self.ranks, self.flag)
        self.record("halted" if self.flag.halted else "stopped", step=step, epoch=epoch, reason=reason)
        if self.sharing.leads:
            self.control.stop_file.withdraw()
        self.ranks.barrier()
        self.close()
        if self.flag.halted:
            raise Halted(reason)
        job = slurm.job()
        if self.flag.on.requeue and self.ranks.rank == 0 and job is not None and is_warning(reason):
            slurm.requeue(job)
        raise Stopped(reason, self.flag.on.exit_code)

    def record(self, state: str, **facts: Any) -> None:
        """Write ``status.json`` (where a directory is led), so that a person and the next start see how the run is.

        Where a later start owns the run directory the status is that start's, and is left alone.

        Args:
            state: ``running``, ``stopped``, ``halted``, ``finished`` or ``failed``.
            facts: fields of :class:`RunStatus` that are known better than from the last
                step.
        """
        if self.sharing.leads:
            self._live.set_state(state, facts)

    def _status(self, state: str) -> RunStatus:
        status = self._lifecycle.status(state)
        status.generation, status.last_commit = self.generation, self.committer.committed
        return status

    def close(self) -> None:
        """Give the signals back and end the background threads; raise what the last commit raised, if nobody has.

        The run directory stays as it is.
        """
        try:
            self._lifecycle.end()
        finally:
            self.committer.close()
        self.flush()
