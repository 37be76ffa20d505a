"""One training call of any framework: what every adapter does around the core's verbs, in the order it must happen.

A save is read here from the top: :meth:`Session.save` asks the framework for its files and the training loop for its
state, and gives both to the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from resume_adapters.core.checkpoint.checkpoint import Checkpoint
from resume_adapters.core.checkpoint.manifest import Ancestry, Manifest, PartEntry, finite_metrics
from resume_adapters.core.checkpoint.native_files import require_loadable
from resume_adapters.core.checkpoint.writer import CallContent, Captured
from resume_adapters.core.choices import Audit, Fork
from resume_adapters.core.log import logger
from resume_adapters.core.observed.paths import is_module
from resume_adapters.core.observed.variables import ScriptVariables
from resume_adapters.core.observed.walk import Subjects
from resume_adapters.core.observed.when import TENSORS, ObservedState
from resume_adapters.core.recovery.attempt import running_attempt
from resume_adapters.core.requirements import did_you_mean
from resume_adapters.core.run.run import ResumableRun
from resume_adapters.core.run.step_control import GO_ON, Decision
from resume_adapters.core.run_directory.status import RunState
from resume_adapters.core.session.audit import ReplicaAudit
from resume_adapters.core.session.context import BestCheckpoint, RestoreContext
from resume_adapters.core.session.finished import Extent, mark_finished, require_continuation
from resume_adapters.core.session.fork import fork
from resume_adapters.core.session.framework import CheckpointFacts, Framework, TrainingLoop
from resume_adapters.core.session.held import HeldCall, SaveForm
from resume_adapters.core.session.loaders import LoaderRestorer
from resume_adapters.core.session.messages import PartEntries, log_finished, log_missing
from resume_adapters.core.session.options import ResumeOptions
from resume_adapters.core.session.records import SHARD_DIGESTS, LaunchState, OrderDigest, RankState, data_cursor
from resume_adapters.core.session.rehearsal import NotRehearsed, rehearse_part
from resume_adapters.core.session.rescale import Rescale
from resume_adapters.core.session.restore import Restorer
from resume_adapters.core.session.settings import SettingsComparison, of_launch
from resume_adapters.core.session.trace import StepTrace
from resume_adapters.core.state import rng
from resume_adapters.core.state.constants import CONSTANTS, Constants, left_out
from resume_adapters.core.state.ddp_buckets import hook_states
from resume_adapters.core.state.loading import loading
from resume_adapters.core.state.rng import capture_with, restore_with
from resume_adapters.core.state.sharded_digest import ShardDigests
from resume_adapters.core.state.stateful import REGISTERED, Stateful, StatefulGroup, StaticState
from resume_adapters.core.state.weights import architecture, architecture_digest, resized
from resume_adapters.errors import ResumeError, UnsupportedSetting

_CHANGED = (
    "the training changes what is in these variables of the script, and after a resume they start over: hold them in "
    "an attribute of the trainer, the module or a callback, or pass an object with state_dict(), or a random "
    "generator, as a part"
)


class Session:
    """One training call on a run directory.

    Args:
        run: the run, not yet opened.
        framework: the framework's files and live objects.
        kind: the record of the state that each rank saves.
        rescale: what follows from a different global batch size.

    Attributes:
        loaders: tracks and restores the training loaders.
        restorer: restores everything else.
        observed: finds and restores what nobody has declared.
        constants: compares and restores what training does not change.
        settings: compares what this launch was given with what the checkpoint was saved with.
        part_entries: describes the parts that are captured, and what is not.
        best: which checkpoint a manifest names as the best.
        order_digest: digests the order of the data, for the manifests.
        reason: why the next checkpoint is saved.
        stopping: all ranks have agreed to save and leave.
        has_begun: the first step has begun.
        has_saved: this call has written a checkpoint.
        trace: gets what a watched run writes of its steps; ``None`` where the environment asks for no trace.
        held: what the call holds within a restartable block; ``None`` outside of one.
    """

    def __init__(
        self,
        run: ResumableRun,
        framework: Framework,
        options: ResumeOptions,
        kind: type[RankState],
        rescale: Rescale,
    ) -> None:
        self.run = run
        self.framework = framework
        self.options = options
        self.rescale = rescale
        trace = self.trace = None if run.trace is None else StepTrace(run.trace, framework, options.generators)
        on_track = None if trace is None else lambda loader: trace.add_loader(loader.dataset)
        logger.use_channel(framework.about.channel)
        about = framework.about
        self.settings = SettingsComparison(
            lambda: of_launch(framework.settings(), about.topology, options, about.label)
        )
        self.loaders = LoaderRestorer(run, options.generators, rescale, self.settings.changed_seeds, on_track)
        self.restorer = Restorer(run, framework, options, kind, self.loaders, rescale)
        self.reason = "scheduled"
        self.stopping = False
        self._is_ending = False
        self.has_begun = False
        self.has_saved = False
        self._said: set[PartEntry] = set()
        self.best = BestCheckpoint(run)
        self.order_digest = OrderDigest()
        self._has_refused = False
        self.part_entries = PartEntries(framework, options)
        self.observed = ObservedState(self.subjects, framework.about.registers)
        self._variables = ScriptVariables(self._looked_at)
        self._has_loaded_observed = False
        self._ancestry: Ancestry | None = None
        self.constants = Constants()
        self._is_rehearsed = False
        self._architecture: dict[str, str] | None = None
        self._resized: dict[str, list[int]] = {}
        attempt = running_attempt()
        self.held = None if attempt is None else HeldCall(attempt, self, kind)
        self._audit: ReplicaAudit | None = None
        run.undo_at_close(self._undo)

    # ---- Resuming

    def require_continuation(self, extent: Extent) -> None:
        """Refuse another training where this process has finished one; see :mod:`.finished`.

        Args:
            extent: what is asked for; the same is given to :meth:`finish`.
        """
        require_continuation(self.run, extent, self.framework.about.directory_option)

    def open(self) -> RestoreContext | None:
        """Choose what to resume from, and begin; see :meth:`Restorer.choose`.

        Raises:
            UnsupportedSetting: an audit is asked for within a restartable block.
        """
        context = self.restorer.choose()
        if isinstance(self.options.verify, Audit):
            self._begin_audit(self.options.verify)
        if self.trace is not None:
            self.trace.begin(self.run, context)
        return context

    def _begin_audit(self, given: Audit) -> None:
        if self.held is not None:
            raise UnsupportedSetting(
                "verify=Audit(...) within a restartable block, which goes on from what each rank holds after any step, "
                "audited or not: set verify=True, or train without the block"
            )
        if self.run.ranks.world_size > 1:
            self._audit = ReplicaAudit(self.run.ranks, given.every, self.framework.modules)

    @property
    def context(self) -> RestoreContext | None:
        """What this call resumes from; ``None`` for a fresh start."""
        return self.restorer.context

    @property
    def resumed_manifest(self) -> Manifest | None:
        """The manifest of what this call resumes from; ``None`` for a fresh start and a foreign checkpoint."""
        return self.context.checkpoint.manifest if self.context else None

    def fork(self) -> None:
        """Take what the launch names of another run's checkpoint, where this run has none of its own.

        Call it before the first step, when the models and optimizers are made.

        Raises:
            ResumeError: it cannot be taken; see :func:`~resume_adapters.core.session.fork.fork`.
        """
        given = self.options.resume
        if isinstance(given, Fork) and self.context is None and self.run.resumed is None:
            entries = [*self.framework.describe(), *self.part_entries.captured(self.framework.parts(), counters="")]
            known = dict.fromkeys(each.name for each in entries if each.by != "missing")
            self._ancestry = fork(self.run, self.framework, given, list(known), verify=bool(self.options.verify))

    def random_state(self) -> dict[str, Any]:
        """Return the random state of the process and of the user's generators."""
        return capture_with(self.options.generators)

    def restore_random_state(self, saved: Mapping[str, Any]) -> None:
        """Restore what :meth:`random_state` returned."""
        restore_with(saved, self.options.generators)

    def prepare_observing(self) -> None:
        """Look at what there is before the framework starts the training, where a callback may add to it then."""
        self.observed.prepare()

    def begin_observing(self) -> None:
        """Restore the undeclared state, and begin to look for more; once.

        Call it before the first step, after whatever else makes or resets objects at the start of a training.
        """
        self._load_observed()
        if not self.observed.has_begun:
            if self.held is not None:
                self.held.restore(self.context)
            if self.options.verify:
                saved = self.context.reader.part(CONSTANTS) if self.context else None
                self.constants.begin(self.framework.modules(), saved, self.context.path if self.context else None)
            self.observed.begin()
            if self.run.ranks.rank == 0 and (too_large := self.observed.left_out()):
                logger.info("Too large to be searched for undeclared state: %s.", too_large)
            self._log_differences()

    def watch_script(self) -> None:
        """Look at the variables of the script, to name those that the training changes; with the first step, once.

        Call it at the end of a step, when the script has made what it makes where it needs it first.
        """
        if not self._variables.has_begun:
            self._variables.begin(self._looked_at())

    def begin_settings(self) -> None:
        """Compare the optimizers and schedules with those of the checkpoint; once, before anything is loaded into them.

        The model has the shapes that the script gave it: a check of the validation that comes later may change them.

        Raises:
            StateMismatch: the saved state cannot be loaded into them.
        """
        self.architecture()
        if self.settings.has_begun:
            return
        context = self.context
        launch = context.launch if context else None
        if context is not None:
            self.observed.begin_loading(is_foreign=context.checkpoint.manifest is None)
        self.settings.begin(launch.settings if launch else None, context.path.name if context else "")

    def _log_differences(self) -> None:
        self.begin_settings()
        line = self.settings.describe()
        if self.run.ranks.rank != 0:
            return
        if line:
            logger.warning(line)
        if self.context is not None:
            self.part_entries.log_differences(self.context)

    def move_schedules(self) -> None:
        """Move the schedules to where the run is by samples, if it resumes by samples."""
        lines = self.rescale.move_schedules()
        if self.run.ranks.rank == 0:
            for line in lines:
                logger.info("%s", line)

    def _load_observed(self) -> None:
        if self._has_loaded_observed or self.context is None:
            return
        self._has_loaded_observed = True
        launch = self.context.launch
        if launch is not None and launch.observed:
            self.observed.load(launch.observed, self.context.reader.part(TENSORS) or {})

    def subjects(self) -> Subjects:
        """Return the framework's subjects, the states of DDP's hooks, and what the user's parts leave out.

        Of a module, ``state_dict()`` lacks the plain attributes: the place in a queue whose entries are a buffer.
        """
        subjects, parts = self.framework.subjects(), self._declared()
        is_many = self.run.ranks.world_size > 2  # the sum of two does not depend on their order
        sums = [each.problem for each in self.restorer.concluded_buckets() if each.problem and is_many]
        held = [getattr(part, "generator", part) for part in parts.values()]
        modules = {name: part for name, part in parts.items() if is_module(part)}
        roots = {**modules, **subjects.roots, **hook_states(self.framework.modules())}
        return dataclasses.replace(
            subjects,
            roots=roots,
            captured=[*subjects.captured, *parts.values(), *held],
            unsaved=[*subjects.unsaved, *left_out([*self.framework.modules(), *modules.values()])],
            unnamed=[*subjects.unnamed, *sums],
        )

    def _declared(self) -> dict[str, Any]:
        """Return the user's parts, and what was registered without a name."""
        registered = self.framework.parts().get(REGISTERED)
        return {**self.options.parts, **(registered.named if isinstance(registered, StatefulGroup) else {})}

    def _looked_at(self) -> list[Any]:
        subjects = self.subjects()
        return [*subjects.captured, *subjects.roots.values(), *self.observed.within_code()]

    # ---- Training

    def begin_step(self) -> None:
        """Leave if a stop was asked for before the first step. Every rank calls it when it has the batch of a step.

        Raises:
            Stopped: one was.
        """
        if self.held is not None:
            self.held.attempt.require_peers()
        if not self.has_begun:
            self.has_begun = True
            self.run.end_skipping()
            self.restorer.log_resumed()

    def end_step(self, step: int, epoch: float, horizon: int | None = None) -> Decision:
        """Count a completed step, and return what all ranks do now; see :meth:`StepControl.end_step`.

        Every rank calls it at the end of every step.
        """
        if self.trace is not None:
            self.trace.end_step(step, epoch)
        self.observed.end_step()
        if self._audit is not None:
            self._audit.end_step(step)
        self.restorer.log_resumed()  # a loop that iterates itself has not begun its step here
        if self._is_left:
            return GO_ON  # this step is held, and then the attempt is left
        try:
            decision = self.run.steps.end_step(step, epoch, horizon)
        except RuntimeError:
            if self._is_left:  # the vote was cut, and this step is whole
                return GO_ON
            raise
        if decision.stop:
            self._apply(decision.stop)
        return decision

    @property
    def _is_left(self) -> bool:
        """Whether a rank of the restartable block has failed, and all leave."""
        return self.held is not None and self.held.attempt.is_left

    def keep(self, step: int, loop: TrainingLoop, form: SaveForm) -> None:
        """Within a restartable block, hold the state of now; see :meth:`HeldCall.keep`. Elsewhere do nothing.

        Call it where a checkpoint could be saved, at the end of every step, on every rank.
        """
        if self.held is not None:
            self._load_observed()
            self.held.keep(step, loop, form)

    def ask_to_stop(self) -> bool:
        """Return whether all ranks are to save and leave now.

        Every rank asks at the same places between two ends of a step: between the batches of an evaluation.
        """
        self._beat()
        if not self.stopping:
            self._apply(self.run.steps.should_stop())
        return self.stopping

    def _beat(self) -> None:
        """Show that the training goes on, in what takes longer than a step."""
        if self.held is not None:
            self.held.attempt.pulse.beat()

    def _apply(self, stop: bool) -> None:
        if stop and not self.stopping:
            self.stopping, self.reason = True, f"stop: {self.run.flag.reason}"
            self.run.saver.drain()  # a commit in flight may fail, and then this step is saved again

    def begin_ending(self) -> None:
        """Wait for the commits in flight, before the last step is saved where it is not. Every rank calls it."""
        self.restorer.log_resumed()
        self._is_ending, self.reason = True, "finished"
        if self.held is not None:
            self.held.attempt.pulse.stop()
        self.run.saver.drain()

    def require_metrics(self, found: Iterable[str]) -> None:
        """Check that an evaluation has what the retention policy ranks by, before anything is removed because of it.

        Every rank calls it. A metric may be known to one rank alone.

        Args:
            found: names of the metrics of a whole evaluation, as far as this rank knows them.

        Raises:
            UnsupportedSetting: naming the metric that it lacks.
        """
        wanted = self.run.pruner.keep.metrics
        known = set().union(*self.run.ranks.gather(sorted(found))) if wanted else set()
        for name in sorted(wanted - known):
            whole = f"eval_{name}"
            question = did_you_mean(whole if whole in known else name, known)
            raise UnsupportedSetting(
                f"the retention policy keeps the best by {name!r}, and the evaluation has no such metric: "
                f"{question or 'expected one of its metrics.'} It has {', '.join(sorted(known))}"
            )

    # ---- Saving

    def save(self, name: str, step: int, loop: TrainingLoop, *, is_file: bool = False, to_memory: bool = False) -> None:
        """Save and commit a checkpoint; see :meth:`Saver.save`. At the first, log what is not captured.

        With ``on_save_error="continue"`` it may return without a checkpoint; a save that ends the run never does.

        Args:
            is_file: the framework writes one file of that name, not a directory.
            to_memory: to memory alone, as :meth:`end_step` has said.
        """
        self._load_observed()
        self.observed.before_save()
        self.loaders.look()
        self._variables.compare()
        for note in self.settings.regrouped():
            self.observed.add_missing("optimizer", note)
        content = CallContent(self.write_files, functools.partial(self._capture, loop, name), self.framework.owner_of)
        self._beat()
        is_last = self.stopping or self._is_ending
        try:
            if self._audit is not None:
                self._audit.require_alike(step)
            if to_memory:
                self.has_saved = self.run.saver.save_to_memory(name, step, content, is_file=is_file) or self.has_saved
                return
            is_written = self.run.saver.save(name, step, content, is_file=is_file, is_last=is_last)
        except ResumeError as error:
            self.fail(error, step)
            raise
        self._beat()
        self.reason = "scheduled"
        self.has_saved = self.has_saved or is_written

    def write_files(self, directory: Path) -> None:
        """Write the framework's files; each rank looks at its own at the first save.

        Raises:
            UnsupportedSetting: the model's tensors have changed their names or dtypes.
            NotSerialisable: a file holds what would have to run code to be loaded.
            ResumeError: what was written cannot be loaded back, or is not what was saved.
        """
        now = architecture(dict(self.framework.state_dict()))
        self._resized = resized(self.architecture(), now, self.framework.modules())
        try:
            self.framework.save(directory)
        except OSError:
            raise  # the ranks deal with it together
        except Exception as error:
            if self.held is not None:  # the others may wait for this rank within the framework's save
                self.held.attempt.fail(error)
            raise
        if not self._is_rehearsed and not self._is_left:
            self.require_loadable(directory)
            self._rehearse(directory)
            self._is_rehearsed = True

    def _capture(self, loop: TrainingLoop, name: str) -> Captured:
        """Return what a checkpoint holds beside the framework's files."""
        state, digests = loop.rank_state(), self.shard_digests()
        entries = self._entries(loop)
        self.log_missing(entries)
        return Captured(
            {**state.to_tree(), **self.launch_state(digests.known).to_tree()},
            self._all_parts(loop),
            self._manifest_facts(state, loop.facts(), entries, name),
            lambda: {} if digests.is_complete else {SHARD_DIGESTS: digests.complete()},
        )

    def capture_held(self, loop: TrainingLoop, name: str, state: RankState, facts: CheckpointFacts) -> Captured:
        """Return what the session adds to a state that was held: see :mod:`.held`.

        Args:
            state: what the rank saves for itself.
            facts: what the loop said of it.
        """
        digests = self.shard_digests()
        return Captured(
            self.launch_state(digests.known).to_tree(),
            self._all_parts(loop),
            self._manifest_facts(state, facts, self._entries(loop), name),
        )

    def _all_parts(self, loop: TrainingLoop) -> dict[str, Stateful]:
        """Return what may be alike on all ranks, by name."""
        return {
            **self.options.parts,
            **self.framework.parts(),
            **loop.parts(),
            **self.observed.parts(),
            "architecture": StaticState(self.architecture()),
            **self._constants(),
            "trackers": StaticState(self.framework.trackers.capture()),
        }

    def _constants(self) -> dict[str, Stateful]:
        found = self.constants.capture(self.framework.modules())
        return {CONSTANTS: StaticState(found)} if found["digests"] else {}

    def _entries(self, loop: TrainingLoop) -> list[PartEntry]:
        entries = [*self.framework.describe(), *loop.describe()]
        if names := self._variables.changed(()):
            part = f"{self.framework.about.registers}(name=object)"
            entries.append(PartEntry("script", "missing", f"{', '.join(names)}: {_CHANGED}: {part}"))
        lost = [*self.loaders.missing(), *self._variables.lost_workers]
        entries += [PartEntry("data", "missing", each) for each in lost]
        return [*entries, *(PartEntry(*each) for each in self.observed.describe())]

    def _manifest_facts(
        self, state: RankState, facts: CheckpointFacts, entries: Sequence[PartEntry], name: str
    ) -> dict[str, Any]:
        """Return the fields of the manifest that say what a checkpoint is."""
        resumed = self.resumed_manifest
        metrics = {metric: math.nan if value is None else float(value) for metric, value in facts.metrics.items()}
        return {
            "reason": self.reason,
            "parts": tuple(entries),
            "architecture": architecture_digest(self.architecture()),
            "cursor": data_cursor(facts.epoch, state.loader_states, self.order_digest),
            "epoch": facts.epoch,
            "metrics": finite_metrics(metrics),
            "best": self.best.of_manifest(facts.best, name, resumed.best if resumed else None),
            "ancestry": self._ancestry or (resumed.ancestry if resumed else None),
        }

    def architecture(self) -> dict[str, str]:
        """Return the dtype and shape that each of the model's tensors had at first, by its name without wrappers."""
        if self._architecture is None:
            saved = None if self.context is None else self.context.reader.part("architecture")
            self._architecture = saved or architecture(dict(self.framework.state_dict()))
        return self._architecture

    def require_loadable(self, directory: Path) -> None:
        """Refuse at the first save what no resume could load; each rank looks at its own files.

        Raises:
            NotSerialisable: naming what would have to run code.
        """
        rank, framework = self.run.ranks.rank, self.framework
        own = (
            file
            for file in framework.loaded_files(directory)
            if framework.owner_of(Path(file.name) if file == directory else file.relative_to(directory)) == rank
        )
        require_loadable(own, framework.is_read)

    def _rehearse(self, directory: Path) -> None:
        """Load the first save of a launch back; nothing of that may reach the training."""
        before = rng.capture()
        try:
            with loading():
                if self.options.verify:
                    for name, part in self._declared().items():
                        rehearse_part(name, part)
                    self.framework.rehearse(self.restorer.read(Checkpoint(directory, 0, None)))
        except NotRehearsed as reason:
            if self.run.ranks.rank == 0:
                logger.info("The first save is not loaded back to prove it: %s.", reason)
        except (ResumeError, OSError):
            raise
        except Exception as error:  # of any kind: a copy may lack what only the original has
            logger.warning(
                "The first save could not be loaded back into copies (%s: %s): a resume may fail likewise.",
                type(error).__name__,
                error,
            )
        finally:
            rng.restore(before)

    def shard_digests(self) -> ShardDigests:
        """Return the digests of what is sharded; of what the save under way copies, they are computed from the copy."""
        sharded = self.framework.sharded_state() if self.options.verify else {}
        return ShardDigests(sharded, self.run.ranks.rank, self.run.saver.copy_of)

    def launch_state(self, shard_digests: dict[str, int]) -> LaunchState:
        """Return what the session adds to the state of each rank.

        Args:
            shard_digests: see :class:`LaunchState`.
        """
        return LaunchState(
            topology={**self.framework.about.layout.sizes, **self.framework.about.topology},
            invariants=dict(self.framework.about.invariants),
            shard_digests=shard_digests,
            shift=self.rescale.shift,
            ddp_buckets=[each.order for each in self.restorer.concluded_buckets()],
            observed=self.observed.capture(),
            settings=self.settings.in_force(),
            resized=self._resized,
        )

    def log_missing(self, entries: Sequence[PartEntry]) -> None:
        """Log what is not captured, each once in a run."""
        new = [each for each in entries if each.by == "missing" and each not in self._said]
        if self.trace is not None and (new or not self.has_saved):
            self.trace.add_missing(new)
        self._said.update(new)
        if self.run.ranks.rank == 0:
            manifest = self.resumed_manifest
            log_missing(each for each in new if manifest is None or each not in manifest.parts)

    # ---- Ending

    def is_finished(self, step: int, horizon: int) -> bool:
        """Return whether the run was left as finished at this step, with the same horizon: nothing is left to do."""
        former = self.run.previous
        return former is not None and (former.state, former.step, former.horizon) == (RunState.FINISHED, step, horizon)

    def log_finished(self, step: int, reason: str) -> None:
        """Log that the run had finished, and why nothing is left to train."""
        self.begin_settings()
        if self.run.ranks.rank == 0:
            log_finished(step, reason, self.settings.untrained())

    def finish(self, extent: Extent, *, step: int, epoch: float, **facts: Any) -> None:
        """Set the run's state to finished, unless it was halted since its last step. Every rank calls it.

        Args:
            extent: what was asked for.
            facts: further fields of the run's status.

        Raises:
            Halted: a rank has halted it.
        """
        if self.run.steps.agree_now() and self.run.flag.halted:
            self.run.leave(step, epoch)
        self.run.set_state(RunState.FINISHED, step=step, epoch=epoch, **facts)
        self.run.finish_copies()
        mark_finished(self.run, extent, epoch, step)

    def fail(self, error: Exception, step: int) -> None:
        """Write why the run failed into its status, if it got as far as owning its directory.

        What fails on the way (a commit in flight, the status itself) is logged, so that it does not hide the error.
        """
        if self.held is not None:  # the block writes it, if it does not go on
            self.held.attempt.fail(error)
            return
        self.log_refusal(error)
        if self.run.generation:
            self._set_failed(f"{type(error).__name__}: {error}", step)

    def _set_failed(self, reason: str, step: int) -> None:
        try:
            self.run.saver.flush()
        except (ResumeError, RuntimeError) as of_commit:
            logger.error("A commit in flight failed too: %s", of_commit)
        self.run.set_state(RunState.FAILED, step=step, reason=reason)

    def log_refusal(self, error: BaseException) -> None:
        """Log an error of this package, once: a traceback shows it last, and not everybody's log has tracebacks."""
        if isinstance(error, ResumeError) and self.run.ranks.rank == 0 and not self._has_refused:
            self._has_refused = True
            logger.error("This run cannot continue: %s", error)

    def close(self, *undo: Callable[[], object]) -> None:
        """Undo what the session patched, started and registered. Closing a closed session does nothing.

        Where the run has closed itself, as it does when it is left, that is done but for ``undo``. A run that is closed
        while it runs has failed: its process may live on, as a notebook's does, and trains no more.

        Args:
            undo: what the adapter has to undo before the run is closed.
        """
        # What was cut cannot be closed without an error, and a commit that was in flight has failed.
        is_cut = self._is_left
        if self.held is not None:
            self.held.attempt.pulse.stop()
        error = sys.exc_info()[1]
        is_of_block = self.held is not None and (is_cut or isinstance(error, Exception))  # which may go on
        if self.run.is_running and not is_of_block:
            reason = f"{type(error).__name__}: {error}".removesuffix(": ") if error else "it was left before its end"
            self._set_failed(reason, self.run.steps.progress.step)
        expected = (RuntimeError, ResumeError) if is_cut else ()
        with contextlib.suppress(*expected), contextlib.ExitStack() as stack:
            stack.callback(self.run.close)
            for each in undo:
                stack.callback(each)

    def _undo(self) -> None:
        if self.held is not None:
            self.held.end()
        with contextlib.ExitStack() as stack:
            stack.callback(self.loaders.close)
            stack.callback(self.observed.close)
            if self._audit is not None:
                stack.callback(self._audit.close)
            stack.callback(self.restorer.close)
            stack.callback(self.framework.trackers.close)
            stack.callback(self.framework.close)
            if self.trace is not None:
                stack.callback(self.trace.close)
