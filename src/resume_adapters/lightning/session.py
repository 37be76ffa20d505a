"""One call of ``Trainer.fit``, from the checkpoint that it resumes from to the end of its run."""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from resume_adapters.core.checkpoint.layout import CheckpointState, state_of
from resume_adapters.core.checkpoint.manifest import PartEntry, finite_metrics
from resume_adapters.core.checkpoint.retention import KeepUnless
from resume_adapters.core.log import logger
from resume_adapters.core.patching import replaced
from resume_adapters.core.run_directory.status import RunState
from resume_adapters.core.session.context import RestoreContext
from resume_adapters.core.session.finished import Extent
from resume_adapters.core.session.framework import CheckpointFacts
from resume_adapters.core.session.held import SaveForm
from resume_adapters.core.session.new_run import new_run
from resume_adapters.core.session.numbered import Training
from resume_adapters.core.session.options import ResumeOptions
from resume_adapters.core.session.rescale import Rescale
from resume_adapters.core.session.session import Session
from resume_adapters.core.state.rng import GeneratorState
from resume_adapters.core.state.stateful import Stateful
from resume_adapters.lightning import files, logged_values, model_checkpoints, strategies, tuning
from resume_adapters.lightning.data import FitData
from resume_adapters.lightning.framework import LightningFramework
from resume_adapters.lightning.loops import Loops, SavePoint
from resume_adapters.lightning.records import FitRankState
from resume_adapters.lightning.supported import no_horizon


class FitSession:
    """One call of ``fit()`` on a trainer that has a :class:`~resume_adapters.lightning.ResumeCallback`.

    It is the session's :class:`TrainingLoop`.

    Args:
        named: the ``ckpt_path`` of the ``fit``.
        training: what it was given, where its directory has the number of a version.
        fit: which ``fit()`` of this trainer it is, from 1; those that failed do not count.

    Attributes:
        run: the run.
        has_finished: it has trained to its end, now or in an earlier launch.
        loops: the trainer's loops.
        data: the training loaders.
    """

    def __init__(
        self,
        trainer: Any,
        options: ResumeOptions,
        named: str | os.PathLike[str] | None,
        training: Training | None,
        fit: int,
    ) -> None:
        directory = Path(os.path.realpath(model_checkpoints.saving(trainer)[0].dirpath))
        self._trainer = trainer
        # Why Lightning alone would begin this fit at step 0; empty where it would train further.
        is_fresh = named is None and not trainer.global_step
        self._begins = "a Trainer that has trained nothing and gets no ckpt_path" if is_fresh else ""
        self._training = training
        self._fit = fit
        self._is_named = named is not None
        self.has_finished = False
        self._unwanted: set[str] = set()
        self._wanted: frozenset[str] = frozenset()
        self._saves_to_memory = False
        self._newest = Path()
        self._framework = LightningFramework(trainer, directory)
        by_handler = Path(named or "").name.startswith("hpc_ckpt_")  # Lightning's own, of Slurm's signals
        inside = named is None or by_handler or files.is_same(Path(named).parent, directory)
        unless_unwanted = KeepUnless(self._unwanted, files.OWN_NAME.partition("{")[0])
        self.run = new_run(directory, self._framework, options, resume=None if inside else named, keep=unless_unwanted)
        rescale = Rescale(options.on_batch_change, self._framework.about.accumulation, no_horizon=no_horizon(trainer))
        self._session = Session(self.run, self._framework, options, FitRankState, rescale)
        self.loops = Loops(trainer)
        self.data = FitData(self.loops, self._session)
        self._point: tuple[tuple[int, ...], SavePoint | None] = ((), None)
        self._is_due = False
        self._limits = self.loops.limits
        self._expected_steps: int | None = None
        self._before_validation: FitRankState | None = None
        self._fingerprint: str | None = None
        self._votes_left: float = 0
        self._is_training = self._has_validated = self._has_ended_epoch = False
        self._metric_attributes = logged_values.attributes(trainer.lightning_module)

    # ---- Resuming

    def load(self, native: Callable[[Path | None], object]) -> None:
        """Choose what to resume from, and let Lightning load it.

        Args:
            native: Lightning's own load of a path, or of nothing.

        Raises:
            ResumeError: as the documentation's table of errors says.
        """
        self._session.require_continuation(self._extent())
        self._session.open()
        if self._training is not None and self.run.storage_group.is_leader:
            self._training.write(self.run.storage, self.run.directory)
        self._prefer_newer_hpc()
        self._leave_to_other_fits()
        context = self._session.context
        self._session.prepare_observing()
        if self.loops.have_loaders:  # a strategy that is set up before it loads may have asked for them
            if context is None or context.rank_state is None:
                self.data.track(self.loops.loaders)
            else:
                self.loops.forget_loaders()  # to resume, they are made once more
        if context is None:
            native(None)
            return
        if strategies.is_sharded(self._trainer) and self._framework.engine is None:
            self.after_setup()  # the strategy is set up before it loads, so on_fit_start is over
        elif self._framework.engine is not None:
            self._session.begin_settings()
        given, limits = (context.rank_state.limits if context.rank_state else None) or (None, [])
        if given == self._limits:  # else this launch asks for another end
            self.loops.fit.max_epochs, self.loops.epoch.max_steps = limits
        self._framework.load(context, native)
        if context.rank_state is None:
            model_checkpoints.mark_saved(self._trainer, context.step)

    def _leave_to_other_fits(self) -> None:
        """Load nothing where the trainer has just finished what was saved, or a later ``fit()`` of it is to load it.

        Lightning makes new optimizers for a further ``fit()``.
        """
        context = self._session.context
        saved = context.rank_state.fit if context is not None and context.rank_state is not None else None
        if context is None or saved is None or self._is_named:
            return
        self.has_finished = saved > self._fit
        if self.has_finished:
            logger.info("This fit() has finished in an earlier launch: %s is of a later one.", context.path.name)
        elif saved < self._fit and self._trainer.global_step == context.step:
            logger.info("This fit() begins with the trainer as it is, as it would without this package.")
            self._wanted = model_checkpoints.wanted(self._trainer)
        else:
            return
        self._session.restorer.replace_context(None)

    def _prefer_newer_hpc(self) -> None:
        """Resume from what Slurm's handler saved, if it is newer than everything in the run directory."""
        if self.run.context.options.resume == "scratch!":
            return
        found, context = self._framework.hpc_checkpoint(), self._session.context
        if found is not None and found.step > (context.step if context else 0):
            logger.warning("Resuming from %s: step %d is newer than the run directory.", found.path, found.step)
            self._session.restorer.replace_context(self._session.restorer.read(found))

    def after_setup(self) -> None:
        """Look at what is set up, and not loaded; a new run may begin with weights of another."""
        self._session.begin_settings()
        self._framework.remember_schedules(self._session.rescale.schedules)
        self._session.fork()

    def checking(self) -> contextlib.AbstractContextManager[None]:
        """Observe what a check or a finder before the first step changes; see :meth:`ObservedState.checking`."""
        return self._session.observed.checking()

    def restore_tuned(self) -> bool:
        """Restore what a finder had found before the first step; return whether it needs no search in this launch.

        After loading it would search with trained weights, and Lightning would forget the rest of the checkpoint.
        """
        context = self._session.context
        if context is None or self._is_training:
            return False
        if context.rank_state is not None:
            tuning.restore(self._trainer, context.rank_state.tuned or {})
        return True

    def run_fit_loop(self, native: Callable[[], object]) -> None:
        """Run the fit loop, from the save point on if a checkpoint holds one."""
        context = self._session.context
        if self.has_finished:
            self._leave_as_it_was()
            return
        if context is None or context.rank_state is None:
            native()
            return
        # A finished run too: what followed its last checkpoint may have changed weights, as averaging does.
        self.loops.run_from(
            context.rank_state.save_point,
            lambda: self._restore(context),
            lambda: self._restore_start(context),
        )
        former = self.run.previous
        if former is not None and former.state is RunState.FINISHED and self._trainer.global_step == context.step:
            self._session.log_finished(context.step, self.loops.why_over())

    def _leave_as_it_was(self) -> None:
        """Leave the run to a later ``fit()``, with the state that it had."""
        former = self.run.previous
        assert former is not None, "an earlier launch has saved"
        state = RunState.FINISHED if former.state is RunState.FINISHED else RunState.STOPPED
        self.run.set_state(state, step=former.step, epoch=former.epoch, horizon=former.horizon, result=former.result)

    def _restore(self, context: RestoreContext) -> None:
        """Restore what the start of the loop resets, and verify what the trainer loaded."""
        state: FitRankState = context.rank_state
        module = self._trainer.lightning_module
        # ModelCheckpoint may remove what was loaded: retention knows when it may go.
        self._trainer._checkpoint_connector._ckpt_path = None  # seam: lightning 2.4-2.6
        if context.verify:
            context.verify_shards(self._framework.sharded_state)
        self._framework.verify_loaded(context)
        if self._framework.engine is not None and state.engine is not None:
            self._framework.engine.load_rank_state(state.engine)
        self._session.restorer.align_buckets()
        values, held = state.metrics, state.gradients
        if context.has_other_ranks:
            values, held = self._redistribute(context)
        logged_values.restore(self.loops, values, state.save_point)
        logged_values.restore_rows(self._trainer, state.csv or {}, self.run.storage)
        self.loops.restore_progress(self.data.progress_here(context), state.save_point, state.row)
        if state.save_point.in_epoch:
            self.loops.set_accumulation()
        self.data.restore_cycles(context)
        strategies.restore_gradients(module, held)
        if held and self._session.trace is not None:
            self._session.trace.begin_partial_step()
        self.loops.restore_validated(state.validated or [])
        validation = state.validation_data or [], state.evaluation_workers, state.validation_workers
        self._framework.validation_data.restore(*validation)
        model_checkpoints.restore(self._trainer, state.checkpoints)
        self._wanted = model_checkpoints.wanted(self._trainer)
        self._unwanted.update(set(state.unwanted or ()) - self._wanted)
        if self._unwanted:  # which the launch before this one was to remove once this checkpoint was committed
            self.run.saver.prune_later(best=model_checkpoints.best(self._trainer))
        self._session.restorer.restore_parts(self._framework.parts())
        context.prove()
        context.drop_proofs()

    def _redistribute(self, context: RestoreContext) -> tuple[logged_values.LoggedValues, dict[str, Any]]:
        """Return the logged values and the gradients of this rank, from those of a different number of ranks.

        Raises:
            StateMismatch: each rank had saved its shards of the gradients.
        """
        saved: list[FitRankState] = context.all_rank_states()
        place = (context.ranks.rank, context.ranks.world_size)
        values = logged_values.redistribute(self.loops, [each.metrics for each in saved], *place)
        if any(each.gradients for each in saved) and strategies.is_sharded(self._trainer):
            raise context.mismatch(
                self._session.loaders.topology_changes,
                "it is in the middle of an accumulation, and its gradients are sharded for the ranks as they were",
            )
        return values, strategies.mean_gradients([each.gradients for each in saved])

    def _restore_start(self, context: RestoreContext) -> None:
        # A Timer has decided for itself: it may have been given more time.
        self._trainer.should_stop |= context.rank_state.should_stop
        self._session.begin_observing()
        self.data.restore_random_state(context)
        self._session.move_schedules()

    # ---- Training

    def begin_training(self) -> None:
        """Prepare the first step: DDP's buckets, and the number of steps that the run will have."""
        context = self._session.context
        self._is_training = True
        if self._framework.engine is not None:
            strategies.require_whole_accumulations(self._trainer)
        if context is None or context.rank_state is None:
            self._session.restorer.align_buckets()
            self._session.begin_observing()
        expected = self._trainer.estimated_stepping_batches
        self._expected_steps = int(expected) if math.isfinite(expected) and expected > 0 else None

    def begin_batch(self, batch: Any) -> bool:
        """Leave before the first step if a stop was asked for; return whether it must be called for each batch.

        Raises:
            Stopped: it was.
        """
        self._session.begin_step()
        if self._session.trace is not None:
            self._session.trace.add_batch(batch)
        return self._session.trace is not None or self._session.held is not None

    def begin_saves(self, outputs: Any) -> None:
        """Allow saves after this batch, from now on until the next one begins.

        Args:
            outputs: what ``training_step`` returned; the trace gets the loss among them, where there is one.
        """
        session = self._session
        if session.trace is not None:
            session.trace.add_loss(outputs.get("loss") if isinstance(outputs, Mapping) else outputs)
        session.observed.release()
        self._save_point = SavePoint.BATCH

    @property
    def _save_point(self) -> SavePoint | None:
        """Where in the training a checkpoint is saved now; ``None`` where the loops have gone on since it was set."""
        place, point = self._point
        return point if place == self.loops.place else None

    @_save_point.setter
    def _save_point(self, point: SavePoint) -> None:
        self._point = self.loops.place, point

    def set_save_point(self, point: SavePoint) -> None:
        """Set where in the training a checkpoint is saved from now on.

        Raises:
            UnsupportedSetting: a validation within an epoch lacks what the retention policy ranks by.
        """
        self._session.observed.release()
        self._save_point = point
        self._has_ended_epoch = self._has_ended_epoch or point is SavePoint.EPOCH
        if point is SavePoint.VALIDATION:
            self._has_validated = True
            if not self.loops.is_last_batch:  # else the hooks of the epoch's end may log more
                self._session.require_metrics([*self._trainer.callback_metrics, *self.loops.logged_names()])

    def end_batch(self) -> None:
        """At an optimizer step, ask whether to save, and whether to stop."""
        if self.loops.is_accumulating:
            return
        if self._framework.engine is not None:
            self._framework.engine.has_stepped(self._session.trace)
        self._session.watch_script()
        decision = self._session.end_step(self._trainer.global_step, self.loops.epochs_reached, self._horizon())
        if decision.save or self._is_due:
            self._is_due = False
            self._save_if_needed()
        elif decision.save_to_memory and not self._is_saved:
            with replaced(self, "_saves_to_memory", True):
                self._trainer.save_checkpoint(self._own_path)
        self._leave_if_asked()
        self.keep()

    def keep(self) -> None:
        """Hold the state of now, within a restartable block."""
        if self._session.held is not None and self._session.has_begun:
            framework, path = self._framework, self._own_path
            form = SaveForm(
                path.name,
                is_file=not framework.saves_directories,
                place="" if self._save_point is None else self._save_point.value,
                saving=functools.partial(framework.saving_later, path),
                own=framework.own_values(),
                objection=framework.objection_to_saving_later,
            )
            with framework.saving(path, self._trainer.save_checkpoint):
                self._session.keep(int(self._trainer.global_step), self, form)

    def validate(self, native: Callable[[], Any]) -> Any:
        """Validate. A stop in the middle saves the state before it, so that a resume validates from the start."""
        batches, ranks = self.loops.validation_batches(), self.run.ranks
        self._framework.validation_data.watch()
        # Ranks vote together, so no more often than the one with the fewest batches can.
        self._votes_left = math.inf if ranks.world_size == 1 else min(ranks.gather(batches))
        if not self._trainer.sanity_checking:
            self._save_point = SavePoint.DUE
            self._before_validation = self._capture(SavePoint.DUE)
            self._session.observed.hold()
            if self._votes_left and not self._is_saved:
                self._fingerprint = self._take_fingerprint()
            self.keep()
        with self.checking() if self._trainer.sanity_checking else contextlib.nullcontext():
            result = native()
        self._framework.validation_data.look()
        self._before_validation = self._fingerprint = None
        return result

    def _take_fingerprint(self) -> str | None:
        # What counts of a generator is in the positions of the loaders.
        named = self._session.options.parts.items()
        parts = {name: part for name, part in named if not isinstance(part, GeneratorState)}
        return strategies.fingerprint(self._trainer, {**parts, **self._framework.parts()})

    def end_validation_batch(self) -> None:
        """Between the batches of a validation, ask whether to stop, and leave if nothing is lost by it.

        Where something has changed what would be saved, as averages that replace the weights do, the validation is
        finished first.

        Raises:
            Stopped: the ranks stop.
        """
        if self._votes_left <= 0:
            return
        self._votes_left -= 1
        if not self._session.ask_to_stop():
            return
        self._votes_left = 0
        if self._trainer.sanity_checking:
            self.run.leave(self._trainer.global_step, self._epoch())
        if not self._is_saved:
            is_unchanged = self._fingerprint is not None and self._fingerprint == self._take_fingerprint()
            if not all(self.run.ranks.gather(is_unchanged)):
                return
        self._leave_if_asked()

    def end_validation(self) -> None:
        """After a validation, which may be long, ask once more whether to stop."""
        self._session.ask_to_stop()
        self._leave_if_asked()
        self.keep()

    def _leave_if_asked(self) -> None:
        """Save and leave, if all ranks have agreed to.

        Raises:
            Stopped: they have.
        """
        if self._session.stopping:
            self._save_if_needed()
            self.run.leave(self._trainer.global_step, self._epoch())

    @property
    def _is_saved(self) -> bool:
        return self.run.last_commit == int(self._trainer.global_step)

    def _save_if_needed(self) -> None:
        if not self._is_saved:
            self._trainer.save_checkpoint(self._own_path)

    @property
    def _own_path(self) -> Path:
        return self.run.directory / files.OWN_NAME.format(step=self._trainer.global_step)

    def _epoch(self) -> float:
        """Return the epochs done, with the fraction of the running one."""
        if self._save_point is None or not self._save_point.in_epoch:
            return float(self.loops.epochs_done)
        return self.loops.epochs_reached

    # ---- Saving

    def save_checkpoint(self, native: Any, filepath: Any, weights_only: bool | None = None, *rest: Any) -> None:
        """Save a checkpoint that this run can resume from by the session, and any other as the trainer does."""
        path = Path(os.path.abspath(filepath))
        is_whole = not weights_only and files.is_same(path.parent, self.run.directory)
        if is_whole and self._save_point is not None:
            self._save(path, lambda place: native(str(place), weights_only, *rest))
        else:
            native(filepath, weights_only, *rest)
            self._is_due = self._is_due or is_whole  # at the end of the step: the script has saved within it

    def is_newest(self, path: Path) -> bool:
        """Return whether a path is that of the last save, which may not have its name yet."""
        return path.name == self._newest.name and files.is_same(path.parent, self.run.directory)

    def _save(self, path: Path, native: Callable[[Path], object]) -> None:
        """Save a checkpoint of the current step.

        Args:
            native: the trainer's own save, to the path that it is given.

        Raises:
            UnsupportedSetting: a whole epoch lacks what the retention policy ranks by.
        """
        if self._has_ended_epoch and (self._has_validated or not self._trainer.enable_validation):
            self._session.require_metrics(self._trainer.callback_metrics)
        if self._framework.engine is not None and self._save_point is not SavePoint.END:
            strategies.require_no_accumulation(self._framework.engine)
        self._unwanted.discard(path.name)
        self._newest = path
        self.keep()
        with self._framework.saving(path, native):
            self._session.save(
                path.name,
                self._trainer.global_step,
                self,
                is_file=not self._framework.saves_directories,
                to_memory=self._saves_to_memory,
            )
        self._wanted = model_checkpoints.wanted(self._trainer)

    def rank_state(self) -> FitRankState:
        """Return what this rank saves for itself; while a validation runs, as it was before that."""
        under_way = self._framework.under_way
        assert self._save_point is not None and under_way is not None, "a checkpoint is saved at a save point"
        before = self._before_validation if self._save_point is SavePoint.DUE else None
        state = self._capture(self._save_point) if before is None else before
        return replace(
            state,
            checkpoints=model_checkpoints.capture(self._trainer, under_way[0]),
            unwanted=sorted(self._unwanted | (self._wanted - model_checkpoints.wanted(self._trainer))),
            own_objects=self._framework.own_objects,
        )

    def _capture(self, point: SavePoint) -> FitRankState:
        loops, validation = self.loops, self._framework.validation_data
        workers = validation.workers()
        return FitRankState(
            point=point.value,
            epoch=loops.epochs_done,
            loaders=self.data.states(point),
            progress=loops.progress(),
            metrics=logged_values.capture(loops, point, self._metric_attributes),
            row=logged_values.pending_row(loops, point),
            gradients=strategies.capture_gradients(loops),
            evaluation_workers=validation.running(workers),
            engine=None if self._framework.engine is None else self._framework.engine.rank_state(),
            should_stop=self._trainer.should_stop and not loops.is_out_of_time,
            checkpoints={},
            validated=loops.validated(),
            csv=logged_values.capture_rows(self._trainer, self.run.storage),
            tuned=tuning.capture(self._trainer),
            validation_data=validation.capture(),
            validation_workers=workers,
            limits=[self._limits, loops.limits],
            fit=self._fit,
        )

    def parts(self) -> dict[str, Stateful]:
        """Return nothing: what a fit adds differs between ranks."""
        return {}

    def describe(self) -> list[PartEntry]:
        """Return an entry for each part that this package captures."""
        counted = {
            "counters": "progress of the loops, gradients of an unfinished accumulation",
            "metrics": "logged values that callbacks and schedulers read; what ModelCheckpoint does not save",
        }
        return self._session.part_entries.captured(self._framework.parts(), **counted)

    def facts(self) -> CheckpointFacts:
        """Return what the manifest says of this checkpoint."""
        is_fresh = self._save_point in (SavePoint.VALIDATION, SavePoint.EPOCH)
        # Metrics of an earlier step say nothing of these weights, and retention would rank them by it.
        numbers = {name: float(value) for name, value in self._trainer.callback_metrics.items()} if is_fresh else {}
        return CheckpointFacts(self._epoch(), finite_metrics(numbers), model_checkpoints.best(self._trainer))

    def remove_checkpoint(self, native: Callable[[Any], object], filepath: Any) -> None:
        """Remove a checkpoint that Lightning no longer wants, once a newer one is committed.

        What a restart would resume from stays, and so does the best.
        """
        if not model_checkpoints.may_have_saved(self._trainer, str(filepath)):
            logger.warning("%s is not removed: no ModelCheckpoint of this training saves there.", filepath)
            return
        path, storage = Path(os.path.abspath(filepath)), self.run.storage
        is_link, state = False, CheckpointState.FOREIGN
        if files.is_same(path.parent, self.run.directory):
            # Rank zero says it for all: a commit may have pruned it when another rank looks, which then would not prune
            is_link, state = self._trainer.strategy.broadcast((storage.is_link(path), state_of(storage, path)))
        if is_link:
            # Lightning would leave a dangling one, and it protects what it points to.
            if self.run.storage_group.is_leader:
                with contextlib.suppress(FileNotFoundError):
                    storage.remove_file(path)
        elif state in (CheckpointState.COMMITTED, CheckpointState.PENDING):
            self._unwanted.add(path.name)
        else:
            native(filepath)
            return
        self.run.saver.prune_later(best=model_checkpoints.best(self._trainer))

    # ---- Ending

    def end_training(self, native: Callable[[], object]) -> None:
        """Save the last step if it is not saved, end as the trainer does, and mark the run as finished."""
        self._save_point = SavePoint.END
        self._session.begin_ending()
        self._save_if_needed()
        native()
        self.run.saver.flush()
        self.has_finished = True
        self._session.finish(
            self._extent(), step=self._trainer.global_step, epoch=self._epoch(), horizon=self._horizon()
        )

    def _extent(self) -> Extent:
        epochs, steps = self._trainer.max_epochs, self._trainer.max_steps
        return Extent(epochs if epochs and epochs > 0 else None, steps if steps > 0 else None, begins=self._begins)

    def _horizon(self) -> int | None:
        """Return the steps after which the run is finished; ``None`` where that is not known before its end."""
        expected = self._expected_steps
        return None if expected is None else expected + self._session.rescale.shift

    def fail(self, error: Exception) -> None:
        """Write why the run failed into its status."""
        self._session.fail(error, self._trainer.global_step)

    def close(self) -> None:
        """Undo what the session started and registered."""
        self._session.close()
