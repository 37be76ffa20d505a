"""The state of a hand-written loop: saved in a checkpoint, and restored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from resume_adapters.core.checkpoint.manifest import PartEntry
from resume_adapters.core.dataloader.instrument import TrackedIterator
from resume_adapters.core.loop.framework import LoopFramework, Resumed
from resume_adapters.core.loop.loader import Batches, PassState
from resume_adapters.core.loop.metrics import BestMetrics, LoopMetrics, LossSum
from resume_adapters.core.loop.passes import EpochPasses
from resume_adapters.core.loop.repeated import LoadedState, refill
from resume_adapters.core.loop.windows import BESIDE, StepWindows, TakenAhead, counted_from_zero
from resume_adapters.core.observed.epoch_values import made_in_epoch
from resume_adapters.core.observed.instances import instances
from resume_adapters.core.observed.script import Place, calling_script, carried, is_within_range, of_the_run
from resume_adapters.core.observed.variables import ScriptVariables
from resume_adapters.core.session.context import RestoreContext
from resume_adapters.core.session.framework import CheckpointFacts
from resume_adapters.core.session.held import SaveForm
from resume_adapters.core.session.records import RankState
from resume_adapters.core.session.session import Session
from resume_adapters.core.state import rng
from resume_adapters.core.state.comparison import verify_equal
from resume_adapters.core.state.records import FRESH, Tried
from resume_adapters.core.state.stateful import Stateful, StaticState

_NO_LOADER = (
    "no loader was given to run.batches(): data that follow from the random state or from run.global_step alone go on "
    "after a resume, any others start over"
)

_CARRIED = (
    "the loop carries what is in these variables from step to step, and after a resume they start over: keep them in "
    "run.memory, a dict that is saved, or pass an object with state_dict(), or a random generator, as a part; an "
    "iterator over a loader, and the generator of a validation's data, goes on if it is one over run.batches(loader)"
)

_OF_AN_EPOCH = (
    "an epoch begins by making these of what is trained, and a resume within it makes them of what is trained by then: "
    "keep data in run.memory with their epoch, and make them where it has another; pass the copy of a model as a part "
    "that each epoch loads into"
)


@dataclass
class LoopRankState(RankState):
    """What one rank of a hand-written loop saves for itself.

    Attributes:
        epoch: the epoch that is running, from 0.
        begun: :attr:`EpochPasses.again`; in a checkpoint of an older version, the passes that had begun.
        loaders: where each loader is.
        losses: the running sum of the losses.
        framework: the record of :meth:`LoopFramework.rank_state`, as a tree.
        rng: the random state of the process.
        windows: the batches that optimizer steps took.
        memory: what the script keeps from launch to launch.
        ahead: :attr:`TakenAhead.habit`.
        epoch_rng: the random state with which the script began the epoch; ``None`` in a checkpoint of an older version.
    """

    epoch: int
    begun: int
    loaders: list[PassState]
    losses: LossSum
    framework: dict[str, Any]
    rng: Annotated[dict[str, Any], FRESH, Tried(rng.require)]
    windows: list[int] | None = None
    memory: dict[str, Any] | None = None
    ahead: list[int] | None = None
    epoch_rng: Annotated[dict[str, Any] | None, FRESH, Tried(rng.require)] = None

    @property
    def loader_states(self) -> Sequence[PassState]:
        """The states of the training loaders."""
        return self.loaders


class LoopCheckpointing:
    """Saves and restores a loop. It is the session's :class:`TrainingLoop`.

    Args:
        framework: the framework's side of the loop.

    Attributes:
        passes: the passes over the training loaders.
        metrics: the losses and metrics of the loop.
        windows: the batches that optimizer steps take.
        memory: what the script keeps from launch to launch, on this rank.
        loaded: what was loaded, until the training goes on from it.
        script: the loop of the script that is running; ``None`` before its first step.
    """

    def __init__(self, framework: LoopFramework, session: Session) -> None:
        self.passes = EpochPasses(framework, session)
        self.metrics = LoopMetrics()
        self.windows = StepWindows()
        self.memory: dict[str, Any] = {}
        self.loaded = LoadedState(session, self._load_again)
        self.script: list[Place] | None = None
        self._carried: list[str] | None = None
        self._of_epoch: list[str] = []
        self._variables = ScriptVariables(self._known)
        self._counted: str | None = None
        self._epoch_rng: dict[str, Any] | None = None
        self._rng_of_save: dict[str, Any] | None = None
        self._framework = framework
        self._session = session
        self._name: str | None = None
        self._epoch = self._step = 0

    # ---- Resuming

    def restore(self) -> Resumed:
        """Choose, load and restore; return how much of the run is done.

        Raises:
            ResumeError: as the documentation's tables of errors say.
        """
        framework, restorer = self._framework, self._session.restorer
        context = self._session.open()
        self._session.begin_settings()
        if context is None:
            self._session.fork()
            restorer.align_buckets()
            return Resumed()
        context.prepare_model(framework.state_dict(), framework.modules())
        self.loaded.begin()
        self._load(context)
        state: LoopRankState | None = context.rank_state
        if state is None:
            done = framework.load_foreign(context)
            self.passes.restore_foreign(done.batches)
            restorer.align_buckets()
            return done
        done = self._restore_loop(context, state)
        restorer.align_buckets()
        framework.load_rank_state(framework.rank_state_type.from_tree(state.framework, context.source, "framework."))
        rng.resume(state.rng)
        return done

    def _load(self, context: RestoreContext) -> None:
        self._framework.load(context)
        self._session.restorer.restore_parts(self._framework.parts())

    def begin_epochs(self) -> None:
        """Verify what was restored; if the launch resumes within an epoch, when the script has begun that once more.

        It draws then what it drew before: which samples the epoch has, or how far they are moved.
        """
        context = self._session.context
        state: LoopRankState | None = context.rank_state if context is not None else None
        within = state if self.passes.go_on else None
        self.loaded.begin_epochs(is_within=within is not None)
        if within is not None and within.epoch_rng is not None:
            rng.restore(within.epoch_rng)
            self._rng_of_save = within.rng

    def go_on(self) -> None:
        """Verify what was restored where the pass goes on, with the random state of the save."""
        self.loaded.go_on()
        if self._rng_of_save is not None:
            rng.restore(self._rng_of_save)
            self._rng_of_save = None

    def begin_epoch(self) -> None:
        """Note the random state with which the script begins an epoch."""
        self._epoch_rng = rng.capture()

    def _load_again(self, context: RestoreContext) -> None:
        self._load(context)
        if context.rank_state is not None:
            refill(self.memory, context.rank_state.memory or {})

    def _restore_loop(self, context: RestoreContext, state: LoopRankState) -> Resumed:
        consumed = self.passes.restore(state.loaders, state.begun, state.epoch)
        if consumed:
            self.windows.resume(state.windows or [])
        self.passes.ahead = TakenAhead(state.ahead)
        memory = state.memory or {}
        refill(self.memory, memory)
        context.add_proof(lambda: verify_equal("run.memory", memory, self.memory))
        self.metrics.restore(state.losses, context.reader.read_record(BestMetrics, "metrics"))
        return Resumed(state.epoch, context.step, consumed)

    # ---- Saving

    def watch_script(self) -> None:
        """Remember the loop of the script that is running now, and find out at the first save what it carries.

        It is called with the first step.
        """
        self.loaded.end()
        self.script = calling_script()
        self._look_for_count()
        known = self._known()  # it searches for schedules among all objects
        self._variables.begin(known)
        self._of_epoch = made_in_epoch(known)

    def _look_for_count(self) -> None:
        if self._counted is not None:  # once: it looks through all objects
            return
        handed = instances(TrackedIterator if self.passes.external else Batches)
        if handed:
            self._counted = next(filter(None, map(counted_from_zero, handed)), "")
            self._counted = self._counted or is_within_range(self.script or []) * BESIDE

    def _known(self) -> list[Any]:
        """Return what is saved, or looked at, beside the variables of the script."""
        subjects, trained = self._session.subjects(), self._framework.trained()
        of_framework = [*trained.modules, *trained.optimizers, *self._framework.parts().values()]
        within_code = self._session.observed.within_code()
        return [*subjects.captured, *subjects.roots.values(), *within_code, *of_framework, self.memory]

    def save(self, epoch: int, step: int, *, to_memory: bool = False) -> None:
        """Save a checkpoint. Every rank calls it, with no gradients held.

        Args:
            epoch: the epoch that is running, from 0.
            to_memory: to memory alone. What is the best is then left to the next save.

        Raises:
            UnsupportedSetting: the script has evaluated, and the policy ranks by what it was never given.
        """
        self._framework.begin_save()
        self._variables.compare()
        self._epoch, self._step = epoch, step
        name = self._framework.checkpoint_name(step)
        if to_memory:
            self._session.save(name, step, self, to_memory=True)
            return
        if self.metrics.has_evaluated:
            self._session.require_metrics(self.metrics.names)
        self._name = name
        try:
            self._session.save(name, step, self)
        finally:
            self._name = None
        self.metrics.begin_manifest(step)

    @property
    def holds(self) -> bool:
        """Whether the loop is within a restartable block, where :meth:`keep` holds the state."""
        return self._session.held is not None

    def keep(self, epoch: int, step: int) -> None:
        """Hold the state of now, within a restartable block. Every rank calls it, with no gradients held.

        Args:
            epoch: the epoch that is running, from 0.
        """
        if not self.holds:
            return
        self._framework.begin_save()
        self._epoch, self._step = epoch, step
        self._session.keep(step, self, SaveForm(self._framework.checkpoint_name(step), place=f"in epoch {epoch}"))

    def rank_state(self) -> LoopRankState:
        """Return what this rank saves for itself."""
        if self._name is not None:  # here the save before is committed, or it is known that it is not
            self.metrics.assign(self._name, self._step, self._session.run.last_commit)
        process = rng.capture()
        return LoopRankState(
            epoch=self._epoch,
            begun=self.passes.again,
            loaders=self.passes.states(process),
            losses=self.metrics.losses(),
            framework=self._framework.rank_state().to_tree(),
            rng=process,
            windows=self.windows.lengths(),
            memory=self.memory,
            ahead=self.passes.ahead.habit,
            epoch_rng=self._epoch_rng,
        )

    def parts(self) -> dict[str, Stateful]:
        """Return the best metrics: alike on all ranks."""
        return {"metrics": StaticState(self.metrics.best().to_tree())}

    def describe(self) -> list[PartEntry]:
        """Return an entry for each part of the loop, and for what the script carries that nobody captures."""
        counted = {"counters": "epoch, step, running loss", "metrics": "best values, and which checkpoint has them"}
        entries = self._session.part_entries.captured(self._framework.parts(), **counted)
        self._look_for_count()
        if self._counted:
            entries.append(PartEntry("counters", "missing", self._counted))
        if self._step and not self.passes.are_known:
            entries = [*(each for each in entries if each.name != "data"), PartEntry("data", "missing", _NO_LOADER)]
        if self.script is not None and self._carried is None:
            self._carried = carried(self.script)
        entries += [PartEntry("data", "missing", each) for each in self._variables.lost_workers]
        names = self._carried or []
        names = [*names, *self._variables.changed(names, of_the_run(self.script or []))]
        for named, why in ((names, _CARRIED), (self._of_epoch, _OF_AN_EPOCH)):
            if named:
                entries.append(PartEntry("script", "missing", f"{', '.join(named)}: {why}"))
        return entries

    def facts(self) -> CheckpointFacts:
        """Return what the manifest says of this checkpoint."""
        return CheckpointFacts(
            self._epoch + self.passes.fraction, self.metrics.of_manifest(), self.metrics.best_checkpoint
        )
