"""A training call within a restartable block: what it holds at the end of each step, and writes after a failure.

Weights and optimizers are held as they are: they do not change before the next update. So are schedules; one that moves
before is copied then. What changes within a step is copied at its end: where the data are, random states, counters,
buffers, the parts of the user.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from resume_adapters.core.checkpoint.commit import PendingCheckpoint
from resume_adapters.core.checkpoint.manifest import Manifest
from resume_adapters.core.checkpoint.validity import read_manifest
from resume_adapters.core.checkpoint.writer import CallContent, Captured
from resume_adapters.core.log import logger
from resume_adapters.core.observed.when import ObservedState
from resume_adapters.core.ranks import SINGLE_PROCESS, Ranks
from resume_adapters.core.recovery.attempt import RunningAttempt
from resume_adapters.core.recovery.memory import unshared
from resume_adapters.core.recovery.plan import Failure, Level, Moment, Report
from resume_adapters.core.recovery.updates import HeldSchedule
from resume_adapters.core.run.run import ResumableRun
from resume_adapters.core.run_directory.status import RunState
from resume_adapters.core.session.context import RestoreContext
from resume_adapters.core.session.framework import CheckpointFacts, Framework, TrainingLoop
from resume_adapters.core.session.options import ResumeOptions
from resume_adapters.core.session.records import RankState
from resume_adapters.core.state.ddp_buckets import are_replicas, outermost
from resume_adapters.core.state.frozen import NOTHING, FrozenBuffers, FrozenState, TakenBuffer
from resume_adapters.core.state.records import Source
from resume_adapters.core.state.stateful import Stateful, StaticState
from resume_adapters.core.stop.signals import StopFlag
from resume_adapters.core.storage.groups import StorageGroup, shared_by_all
from resume_adapters.core.tiers.tier import reading
from resume_adapters.errors import SaveFailed


class HoldingSession(Protocol):
    """The session of the training call that is held."""

    run: ResumableRun
    framework: Framework
    options: ResumeOptions
    observed: ObservedState

    def write_files(self, directory: Path) -> None:
        """Write the framework's files."""

    def capture_held(self, loop: TrainingLoop, name: str, state: RankState, facts: CheckpointFacts) -> Captured:
        """Return what is added to what is held."""

    def close(self) -> None:
        """Undo what the call patched, started and registered."""


BUFFERS = "held_buffers"
"""The part that holds the buffers of each rank: frameworks save those of one."""


class SaveForm(NamedTuple):
    """How a framework saves outside of its own training loop.

    Attributes:
        name: the checkpoint that a save would be.
        is_file: it would be a file, not a directory.
        place: where in the training it would be, of several places within one step.
        saving: returns the context in which the framework saves, with what changes within a step as it was.
        own: what of that is to be copied, by name, as it is now; ``saving`` is given the copy.
        objection: why a save outside of the loop would not be exact; empty where it is.
    """

    name: str
    is_file: bool = False
    place: str = ""
    saving: Callable[[Mapping[str, Any]], AbstractContextManager[object]] = contextlib.nullcontext
    own: Mapping[str, Any] = MappingProxyType({})
    objection: str = ""


class _Moment(NamedTuple):
    """The end of a step."""

    step: int
    form: SaveForm
    loop: TrainingLoop
    facts: CheckpointFacts
    state: FrozenState
    observed: FrozenState
    parts: FrozenState
    own: FrozenState
    buffers: Mapping[str, TakenBuffer]
    is_reduced: bool  # DDP was not told to leave gradients to each rank, as LocalSGD tells it

    @property
    def name(self) -> Moment:
        return Moment(self.step, self.form.place)

    @property
    def is_intact(self) -> bool:
        return all(each.is_intact for each in (self.state, self.observed, self.parts, self.own))


class HeldCall:
    """What one training call holds. It is the attempt's :class:`HeldTraining`.

    Args:
        attempt: the attempt that the call is part of.
        session: its session, whose run is not yet opened.
        kind: the record that the loop saves for each rank.

    Attributes:
        is_over: it was closed before anything failed.
    """

    def __init__(self, attempt: RunningAttempt, session: HoldingSession, kind: type[RankState]) -> None:
        self.attempt = attempt
        self.directory = session.run.directory
        self._session = session
        self._run = session.run
        self._framework = session.framework
        self._kind = kind
        self._moment: _Moment | None = None
        self._former: list[tuple[_Moment, list[HeldSchedule]]] = []
        self._modules: list[Any] = []
        self._buffers: FrozenBuffers | None = None
        self._is_replica = False
        self.is_over = False
        attempt.add(self)

    def restore(self, context: RestoreContext | None) -> None:
        """Restore what a checkpoint in memory holds beside what any other holds.

        Args:
            context: what the call resumes from; ``None`` for a fresh start.
        """
        saved = None if context is None or self._run.attempt_checkpoint is None else context.reader.part(BUFFERS)
        if saved is not None:
            FrozenBuffers(self._framework.modules()).load(saved)

    # ---- At the end of a step

    def keep(self, step: int, loop: TrainingLoop, form: SaveForm) -> None:
        """Hold the state of now. Every rank calls it where a checkpoint could be saved.

        Args:
            form: how the framework would save.

        Raises:
            LeftByPeer: another rank has failed.
        """
        moved, last = self.attempt.updates.begin_holding(), self._moment
        if self._buffers is None:
            self._modules = list(self._framework.modules())
            self._buffers, self._is_replica = FrozenBuffers(self._modules), are_replicas(self._modules)
        self._session.observed.before_hold(compares=last is not None or self._run.attempt_checkpoint is None)
        state, observed = FrozenState(loop.rank_state()), FrozenState(self._session.observed.capture())
        parts = {**self._session.options.parts, **self._framework.parts(), **self._session.observed.parts()}
        moment = _Moment(
            step,
            form,
            loop,
            loop.facts(),
            state,
            observed,
            FrozenState({name: part.state_dict() for name, part in parts.items()}) if parts else NOTHING,
            FrozenState(form.own) if form.own else NOTHING,
            self._buffers.take(),
            all(getattr(each, "require_backward_grad_sync", True) for each in self._modules),
        )
        if last is not None:
            self._pass_on(last, moved, moment)
        self._moment = moment
        seconds = self.attempt.end_step()
        if seconds is not None:
            self._log_recovery(step, seconds)

    def _pass_on(self, last: _Moment, moved: list[HeldSchedule], moment: _Moment) -> None:
        """Keep what ranks that are behind may hold: all moments of this step, and the last of the step before.

        Args:
            moved: the schedules that have moved since the last moment, as they were.
        """
        if last.name != moment.name:
            self._former.insert(0, (last, moved))
        elif self._former:
            self._former[0][1].extend(moved)
        of_before = next((each for each in self._former if each[0].step != moment.step), None)
        self._former = [each for each in self._former if each[0].step == moment.step or each is of_before]

    def _log_recovery(self, step: int, seconds: float) -> None:
        attempt, resumed = self.attempt.attempt, self._run.resumed
        assert attempt.failure is not None and attempt.level is not None, "an attempt before this one has failed"
        begun = resumed.step if resumed else 0
        lost = max(0, (attempt.failure.step or 0) - begun)
        if self._run.storage_group.is_leader:
            self._run.control.journal.append(
                "recovery",
                level=attempt.level.value,
                rank=attempt.failure.rank,
                error=f"{attempt.failure.kind}: {attempt.failure.message}",
                step=begun,
                lost=lost,
                seconds=seconds,
                reason=attempt.reason,
            )
        if self._run.ranks.rank == 0:
            where = "the disk" if attempt.level is Level.DISK else "memory"
            steps = {0: "no step is", 1: "1 step is"}.get(lost, f"{lost} steps are")
            logger.info(
                "Recovered: step %d is done %.2f s after the failure. The state came from %s; %s done again.",
                step,
                seconds,
                where,
                steps,
            )

    # ---- After a failure

    @property
    def generation(self) -> int:
        """The start of the run directory that this call is."""
        return self._run.generation

    @property
    def flag(self) -> StopFlag:
        """Whether it was asked to stop."""
        return self._run.flag

    @property
    def has_committed(self) -> bool:
        """Whether there is a checkpoint on the disk that is later than what it has resumed from, in memory."""
        return self._run.attempt_checkpoint is not None and self._run.saver.engine.last_committed is not None

    @property
    def progress(self) -> int:
        """Optimizer steps completed."""
        resumed = self._run.resumed
        return self._moment.step if self._moment is not None else resumed.step if resumed is not None else 0

    def report(self, *, is_updating: bool) -> Report:
        """Return what is held, and why it cannot be used."""
        moment, directory = self._moment, str(self.directory)
        if moment is None:
            return Report(directory, is_updating=is_updating)
        objection = moment.form.objection
        if not objection and not moment.is_intact:
            objection = "a part of the state that is too large to copy at each step has changed since"
        return Report(
            directory,
            moment.name,
            objection,
            is_updating=is_updating,
            is_replica=self._is_replica and moment.is_reduced,
            former=tuple(each.name for each, _ in self._former if each.is_intact and not each.form.objection),
        )

    def write(self, memory: Path, ranks: Ranks, group: StorageGroup, name: Moment | None, source: int | None) -> Path:
        """Write the state that is held as a checkpoint into a directory: see :meth:`HeldTraining.write`."""
        moment = self._moment_of(name)
        self._go_back(ranks, moment, source)
        path = memory / moment.form.name
        buffers = {key: taken.content for key, taken in moment.buffers.items()}
        pending = PendingCheckpoint(
            self._run.storage, ranks, path, moment.step, unshared, is_file=moment.form.is_file, storage_group=group
        )
        self._write(pending, moment, {BUFFERS: StaticState(buffers)}, "recovery", lambda _: pending.complete())
        return path

    def save(self, ranks: Ranks, name: Moment | None, source: int | None) -> str:
        """Commit the state that is held in the run directory: see :meth:`HeldTraining.save`."""
        if self._run.storage_group.is_partial:
            raise SaveFailed("each node has a run directory of its own, where only a running training saves")
        if name is None:
            memory = self._run.attempt_checkpoint
            assert memory is not None, "it has said so"
            if ranks.rank == 0:  # the memory of its node has the files of all
                self._copy_last(memory)
            return memory.name
        context, catalog, moment = self._run.context, self._run.context.catalog, self._moment_of(name)
        path = self.directory / moment.form.name
        is_there = path.name in catalog.committed() and catalog.summary(path).step == moment.step
        if not ranks.gather(is_there)[0]:
            self._go_back(ranks, moment, source)
            pending = context.pending(path, moment.step, ranks, shared_by_all(ranks), is_file=moment.form.is_file)

            def publish(manifest: Manifest) -> None:
                pending.announce(context.options.latest, context.control.journal.append, manifest)
                pending.set_replaced_aside()

            self._write(pending, moment, {}, "failed", publish)
        return path.name

    def _copy_last(self, source: Path) -> None:
        """Commit a copy of a checkpoint that is in memory as the last of this start."""
        context = self._run.context
        manifest, read = read_manifest(context.storage, source), reading(context.storage, source)
        copies = context.fetch(SINGLE_PROCESS, shared_by_all(SINGLE_PROCESS), context.require_owned)
        copies.copy(source.name, manifest, read, str(source))

    def _moment_of(self, name: Moment | None) -> _Moment:
        held = [self._moment, *(each for each, _ in self._former)]
        found = next((each for each in held if each is not None and each.name == name), None)
        assert found is not None, "it has said that it holds it"
        return found

    def _go_back(self, ranks: Ranks, moment: _Moment, source: int | None) -> None:
        """Restore what has changed since a moment that is held."""
        earlier, since = list[HeldSchedule](), self._moment
        for each, moved in self._former:
            if since is moment:
                break
            since, earlier = each, [*moved, *earlier]
        assert self._buffers is not None, "a step was held"
        if not self._buffers.is_intact(moment.buffers):
            raise SaveFailed(
                "a buffer that is too large to copy at each step has changed, and torch has not counted it"
            )
        self.attempt.updates.restore_schedules(earlier)
        if source is not None:
            self.attempt.updates.take_from(source, ranks, outermost(self._modules))
        self._buffers.restore(moment.buffers)

    def _write(
        self,
        pending: PendingCheckpoint,
        moment: _Moment,
        more: Mapping[str, Stateful],
        reason: str,
        publish: Callable[[Manifest], object],
    ) -> None:
        """Write the state of a moment as a checkpoint, as any other holds it."""

        def captured() -> Captured:
            state = self._kind.from_tree(moment.state.tree, Source(pending.path, "memory", moment.step, ""))
            added = self._session.capture_held(moment.loop, moment.form.name, state, moment.facts)
            held = {name: StaticState(tree) for name, tree in moment.parts.tree.items()}
            return Captured(
                {**moment.state.tree, **added.rank_state, "observed": moment.observed.tree},
                {**added.parts, **held, **more},
                {**added.facts, "reason": reason},
            )

        content = CallContent(self._session.write_files, captured, self._framework.owner_of)
        with moment.form.saving(moment.own.tree):
            self._run.saver.write_now(pending, content, publish)

    def give_up(self, failure: Failure) -> None:
        """Write into the status of the run that it has failed, where it got as far as owning its directory."""
        if not self._run.generation:
            return
        self._run.set_state(RunState.FAILED, step=self.progress, reason=str(failure))

    def end(self) -> None:
        """Mark the call as closed; not where a failure is why."""
        self.is_over = self.is_over or not self.attempt.is_left

    def close(self) -> None:
        """Undo what the call patched, started and registered, if that is not done."""
        self._session.close()
