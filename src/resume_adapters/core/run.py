"""The verbs that adapters call: open a run directory, begin and commit checkpoints, prune, stop.

One :class:`ResumableRun` is one start of a run directory, on all its ranks. Commits run on a background thread with a
channel of their own; an error there is raised by the next :meth:`ResumableRun.save` or :meth:`ResumableRun.flush`,
which every rank calls at the same place.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from resume_adapters.core import directory, place, slurm, state
from resume_adapters.core import ranks as ranks_module
from resume_adapters.core.cadence import Cadence
from resume_adapters.core.commit import PendingCheckpoint
from resume_adapters.core.heartbeat import Progress
from resume_adapters.core.journal import Journal, Status
from resume_adapters.core.lifecycle import Decision, Lifecycle
from resume_adapters.core.listing import Foreign
from resume_adapters.core.manifest import FileEntry, Manifest
from resume_adapters.core.place import CONTROL, superseded
from resume_adapters.core.ranks import Ranks, everywhere
from resume_adapters.core.record import Record, Source
from resume_adapters.core.resolve import Checkpoint, Choice, named
from resume_adapters.core.retention import KeepAll, Plan, Policy
from resume_adapters.core.sharing import by_all
from resume_adapters.core.start import Start
from resume_adapters.core.state import EncodedParts, Stateful
from resume_adapters.core.stop import StopFlag, StopOn, common_reason, is_warning
from resume_adapters.core.storage import LocalStorage, Pointer, Storage
from resume_adapters.errors import Halted, SaveFailed, StateMismatch, Stopped

T = TypeVar("T")


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
        foreign: Foreign = no_foreign,
        latest: Pointer = "link",
        local_rank: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.directory = Path(os.path.abspath(run_directory))
        self.framework = framework
        self.ranks = ranks_module.current() if ranks is None else ranks
        self.storage: Storage = LocalStorage() if storage is None else storage
        self.resume = resume
        self.keep: Policy = KeepAll() if keep is None else keep
        self.foreign = foreign
        self.latest = latest
        self.local_rank = local_rank
        self.sharing = by_all(self.ranks)
        """Which ranks share the run directory; known once it is open."""
        self.clock = clock
        self.journal = Journal(self.storage, self.directory / CONTROL, clock)
        self.generation = 0
        self.resumed: Checkpoint | None = None
        self.previous: Status | None = None
        self.last_commit: int | None = None
        """Step of the newest checkpoint that is committed or being committed."""
        self._committed: int | None = None
        self._state = ""
        self._recording = threading.Lock()
        self._commit_ranks = self.ranks.twin()
        self._lifecycle = Lifecycle(self.ranks, self.journal, stop or StopOn(), cadence, self._refresh, clock)
        self._committer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="resume-adapters-commit")
        self._committing: list[Future[None]] = []

    @property
    def flag(self) -> StopFlag:
        """The flag that asks this process to stop."""
        return self._lifecycle.flag

    # ---- Starting

    def open(self) -> Choice:
        """Take the run directory over and choose what to resume from. Every rank calls it, once.

        Newer checkpoints that were rejected are set aside, and what crashed saves left is removed.

        Raises:
            RunDirectoryUnusable: not a directory, or not writable.
            NoValidCheckpoint: there are checkpoints, and none is valid.
            CheckpointsExist: ``resume="scratch"`` and there are committed checkpoints.
            StateMismatch: a node has a part of the checkpoint that is not of its ranks.
            UnsupportedSetting: the run directory was said to be each node's own, and is not.
        """
        start = Start(
            self.storage,
            self.ranks,
            self.directory,
            self.journal,
            self.resume,
            self.foreign,
            self.latest,
            self.local_rank,
        )
        choice = start.choose()
        self.sharing, self.generation, self.previous = start.sharing, start.generation, start.previous
        self.resumed = choice.checkpoint
        self.last_commit = choice.checkpoint.step if choice.checkpoint and choice.checkpoint.manifest else None
        self._committed = self.last_commit
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
            facts: fields of :class:`~resume_adapters.core.manifest.Manifest` that the adapter knows; called last.
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
        pending.open(functools.partial(directory.set_aside, self.storage))

        def write_alone() -> tuple[dict[str, str], float]:
            native()
            state.write_part(self.storage, pending.directory, state.rank_file("", self.ranks.rank), own())
            return encoded.encode({part: stateful.state_dict() for part, stateful in parts.items()}), self.clock()

        def write_together() -> None:
            digests = [of_rank for of_rank, _ in written]
            encoded.write(self.storage, pending.directory, self.ranks.rank, digests, self.sharing.leader)
            described.update(facts())
            # Listed now: what a callback adds to the directory later is not part of the checkpoint.
            files.extend(self._own_files(pending, owner))

        encoded, described, files = EncodedParts(), dict[str, Any](), list[tuple[Path, Path]]()
        # Asked of all before any writes: the framework's own save may wait for a rank that has given up.
        pending.write(pending.require_visible)
        written = pending.write(write_alone)
        pending.write(write_together)
        self._commit(pending, files, best, {"written": written[0][1], **described}, began)
        self._lifecycle.saved(began)

    def _own_files(self, pending: PendingCheckpoint, owner: Callable[[Path], int]) -> list[tuple[Path, Path]]:
        return [(path, file) for path, file in place.files(pending.path) if self._owns(path, owner)]

    def _commit(
        self,
        pending: PendingCheckpoint,
        files: list[tuple[Path, Path]],
        best: str | None,
        facts: dict[str, Any],
        began: float,
    ) -> None:
        pending.ranks = self._commit_ranks

        def describe(entries: tuple[FileEntry, ...]) -> Manifest:
            return Manifest(
                step=pending.step,
                world_size=self.ranks.world_size,
                generation=self.generation,
                files=entries,
                package=_version(),
                framework=self.framework,
                best=best,
                ranks=self.sharing.members if self.sharing.is_partial else None,
                **facts,
            )

        def work() -> None:
            manifest = pending.commit(files, describe)
            self._committed = pending.step
            took = time.monotonic() - began
            self._lifecycle.committed(took)
            everywhere(
                self._commit_ranks,
                lambda: self._follow(pending, manifest, best, took) if self.sharing.leads else None,
                f"prune after {pending.path.name}",
                failed,
            )

        def failed(cause: Exception) -> SaveFailed:
            return SaveFailed(
                f"{pending.path.name} is committed, but what follows a commit (latest, journal, retention) failed: "
                f"{cause}. Nothing is lost: mend permissions or free space, then launch the same command again",
                path=pending.path,
                step=pending.step,
            )

        self.last_commit = pending.step
        self._committing.append(self._committer.submit(work))

    def _follow(self, pending: PendingCheckpoint, manifest: Manifest, best: str | None, took: float) -> None:
        """Do what follows a commit, on the leaders of run directories: each has committed its own."""

        def announce() -> None:
            pending.announce(self.latest)
            reason, cursor = manifest.reason, manifest.cursor
            self.journal.note("commit", step=pending.step, reason=reason, cursor=cursor, seconds=took)

        everywhere(self.sharing.leaders, announce, f"announce {pending.path.name}")
        self._prune(best, sealed=pending.path.name)
        replaced = superseded(pending.path)
        if place.names(replaced):  # damaged, or pruning would have removed it
            directory.set_aside(self.storage, replaced)

    def _owns(self, file: Path, owner: Callable[[Path], int]) -> bool:
        rank = state.rank_of(file) if file.parts[0] == state.DIRECTORY else owner(file)
        return self.sharing.answering(rank) == self.ranks.rank

    def read_own(self, checkpoint: Checkpoint, rank: int | None = None) -> Any:
        """Return what a rank's ``own`` returned when the checkpoint was saved; ``None`` for a foreign one.

        Args:
            checkpoint: the checkpoint.
            rank: the rank; this one by default.
        """
        name = state.rank_file("", self.ranks.rank if rank is None else rank)
        found = state.read_part(self.storage, place.added(checkpoint.path), name)
        return None if found is None else Record(found, _source(checkpoint, name))

    def read_part(self, checkpoint: Checkpoint, name: str) -> Any:
        """Return a part as it was saved by this rank, or by the leader where the two were alike."""
        return state.read_part(self.storage, place.added(checkpoint.path), name, self.ranks.rank)

    def read_record(self, checkpoint: Checkpoint, name: str) -> Record:
        """Return a part that this package saved for itself.

        Raises:
            FormatMismatch: there is none, since another version wrote the checkpoint; so does what the record lacks.
        """
        found, source = self.read_part(checkpoint, name), _source(checkpoint, name)
        if found is None:
            raise source.lacks(source.file)
        return Record(found, source)

    def require_valid(self, path: Path) -> None:
        """Check a committed checkpoint of this run before something is read from it other than by a resume.

        Raises:
            CheckpointDamaged: naming the file; on the rank that answers for it, and nowhere else.
        """
        self.flush()
        named(self.storage, path, self.foreign)

    def restore_parts(self, checkpoint: Checkpoint, parts: Mapping[str, Stateful], *, verify: bool) -> None:
        """Load every part from a checkpoint and, with ``verify``, prove that it came back.

        Raises:
            StateMismatch: the checkpoint has no such part, though it was made by this package.
            NotRestored: a part's state after loading differs from what was saved.
        """
        for name, part in parts.items():
            saved = self.read_part(checkpoint, name)
            if saved is not None:
                state.restore(name, part, saved, verify=verify)
            elif checkpoint.manifest is not None:
                raise StateMismatch(
                    f"{checkpoint.path.name} has no part {name!r}: it was saved without it. Leave the part out, or "
                    "start another run directory",
                    path=checkpoint.path,
                )

    def flush(self) -> None:
        """Wait for the commit that is under way, and raise what it raised."""
        committing, self._committing = self._committing, []
        try:
            for each in committing:
                each.result()
        except BaseException:
            self.last_commit = self._committed
            raise

    def _fence(self) -> None:
        self.journal.require_generation(self.generation)

    # ---- Retention

    def prune(self, *, best: str | None = None) -> Plan:
        """Remove what the policy does not keep. Those who lead run directories call it, together.

        Returns:
            What it kept and removed.
        """
        return self._prune(best, sealed=None)

    def prune_later(self, *, best: str | None = None) -> None:
        """Remove what the policy does not keep once the commits under way are done. Every rank calls it.

        What goes wrong is raised as that of a commit is.
        """

        def work() -> None:
            everywhere(
                self._commit_ranks, lambda: self.prune(best=best) if self.sharing.leads else None, "prune", failed
            )

        def failed(cause: Exception) -> SaveFailed:
            return SaveFailed(f"could not prune {self.directory}: {cause}. Nothing is lost", path=self.directory)

        self._committing.append(self._committer.submit(work))

    def _prune(self, best: str | None, sealed: str | None) -> Plan:
        leaders = self.sharing.leaders
        everywhere(leaders, self._fence, "prune")
        plan = directory.plan(
            self.storage, self.directory, self.keep, now=self.clock(), best=best, sealed=sealed, leaders=leaders
        )
        directory.prune(self.storage, self.directory, plan, self.journal)
        return plan

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
            self.journal.request_stop(self.flag.reason or "")
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
            self.journal.withdraw_stop()
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
            facts: fields of :class:`~resume_adapters.core.journal.Status` that are known better than from the last
                step.
        """
        with self._recording:
            self._state = state
            if self.sharing.leads and self.journal.is_owned():
                self.journal.set_status(self._status(facts))

    def _refresh(self) -> None:
        with self._recording:
            if self._state == "running":  # what the training thread recorded meanwhile is news, this is not
                self.journal.refresh_status(self._status({}))

    def _status(self, facts: Mapping[str, Any]) -> Status:
        status = self._lifecycle.status(self._state)
        status.generation, status.last_commit = self.generation, self._committed
        for name, value in facts.items():
            setattr(status, name, value)
        return status

    def close(self) -> None:
        """Give the signals back and end the background threads; raise what the last commit raised, if nobody has.

        The run directory stays as it is.
        """
        try:
            self._lifecycle.end()
        finally:
            self._committer.shutdown()
        self.flush()


def _source(checkpoint: Checkpoint, name: str) -> Source:
    package = checkpoint.manifest.package if checkpoint.manifest else ""
    return Source(checkpoint.path, f"{name}.json", checkpoint.step, package)


def _version() -> str:
    from resume_adapters import __version__

    return __version__
