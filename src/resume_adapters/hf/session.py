"""One call of ``Trainer.train``: the trainer's events, translated into the session's verbs in their order."""

from __future__ import annotations

import enum
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerState
from transformers.trainer_utils import TrainOutput

from resume_adapters.core.checkpoint.manifest import PartEntry, finite_metrics
from resume_adapters.core.checkpoint.retention import KeepLast
from resume_adapters.core.dataloader.sampler import length_of
from resume_adapters.core.patching import replaced
from resume_adapters.core.run.run import ResumableRun
from resume_adapters.core.session.context import RestoreContext
from resume_adapters.core.session.finished import Extent
from resume_adapters.core.session.framework import CheckpointFacts
from resume_adapters.core.session.held import SaveForm
from resume_adapters.core.session.new_run import new_run
from resume_adapters.core.session.options import ResumeFrom, ResumeOptions
from resume_adapters.core.session.rescale import GIVEN_IN_STEPS, Rescale
from resume_adapters.core.session.session import Session
from resume_adapters.core.session.settings import as_text
from resume_adapters.core.state.stateful import Stateful, StaticState
from resume_adapters.errors import UnsupportedSetting
from resume_adapters.hf import files
from resume_adapters.hf.data import TrainingData
from resume_adapters.hf.evaluation import InterruptibleEvaluation
from resume_adapters.hf.framework import TrainerFramework
from resume_adapters.hf.records import DueEvaluation, TrainerCounters, TrainerRankState
from resume_adapters.hf.supported import require_supported
from resume_adapters.hf.weights import LIVE_WEIGHTS


class SessionPhase(enum.Enum):
    """Where a training call is.

    OPENED -> RESTORED -> IN_EPOCH <-> BETWEEN_EPOCHS, or OPENED -> FINISHED: an earlier launch has finished the run.
    A fresh start goes from OPENED to IN_EPOCH.
    """

    OPENED = "opened"
    RESTORED = "restored"
    IN_EPOCH = "in an epoch"
    BETWEEN_EPOCHS = "between epochs"
    FINISHED = "finished"


class TrainerSession:
    """One call of ``train()`` on a trainer that has a :class:`~resume_adapters.hf.ResumeCallback`.

    Args:
        resume: ``options.resume``, or what the user gave ``train()``.
        ignore_keys: what the user gave ``train()`` as ``ignore_keys_for_eval``.

    Attributes:
        phase: where the call is.
        is_over: no step is left to train.
        epoch: the epoch that is running, from 0; -1 before the first.
        seconds: the time that earlier launches have trained.
    """

    def __init__(self, trainer: Any, options: ResumeOptions, resume: ResumeFrom, ignore_keys: list[str] | None) -> None:
        cadence = options.cadence()
        require_supported(trainer, cadence)
        args = trainer.args
        self.trainer = trainer
        self.framework = TrainerFramework(trainer)
        limit = args.save_total_limit
        run = new_run(
            args.output_dir,
            self.framework,
            options,
            resume=resume,
            keep=KeepLast(limit) if limit else None,
            placeholder="checkpoint-0",
        )
        rescale = Rescale(
            options.on_batch_change,
            self.framework.about.accumulation,
            no_horizon=GIVEN_IN_STEPS if args.max_steps > 0 else "",
        )
        self.session = Session(run, self.framework, options, TrainerRankState, rescale)
        self.data = TrainingData(trainer, self.session)
        self.evaluation = InterruptibleEvaluation(trainer, self.session, ignore_keys)
        self._extent = _extent(trainer)
        self.phase = SessionPhase.OPENED
        self.is_over = False
        self.epoch = -1
        self.seconds = 0.0
        self._initial_step = 0
        self._started = time.monotonic()
        self._replaces_cadence = cadence is not None
        self._save_due = self._is_due_in_memory = self._saves_to_memory = self._saves_again = False
        self._logged = 0  # rows of the trainer's log that the newest checkpoint has
        self._resumed: TrainerRankState | None = None
        self._asked_steps: int | None = None

    @property
    def run(self) -> ResumableRun:
        """The run."""
        return self.session.run

    @property
    def context(self) -> RestoreContext | None:
        """What is being restored; ``None`` for a fresh start."""
        return self.session.context

    # ---- Resuming

    def open(self) -> str | None:
        """Choose what to resume from; return the path that the trainer is to load."""
        self.session.require_continuation(self._extent)
        context = self.session.open()
        if self.session.trace is not None:
            self.framework.observe_grad_norm(self.session.trace.set_grad_norm)
        self.framework.continue_tensorboards()
        self.session.prepare_observing()
        if context is None:
            return None
        self._resumed = context.rank_state
        if self._resumed is not None:
            self.evaluation.workers.restore(self._resumed.evaluation_workers, self._resumed.evaluation_loaders)
            self.evaluation.data.restore(self._resumed.evaluation_data or {})
        return str(context.path)

    def attach_engine(self, deepspeed: Any) -> None:
        """Attach to the engine through which DeepSpeed trains; see :meth:`TrainerFramework.attach_engine`."""
        self.framework.attach_engine(deepspeed, self.run.directory, self.context, self.session.begin_settings)

    def restore_counters(self, native: tuple[int, int], max_steps: int, epochs: int) -> tuple[int, int]:
        """Return the epoch to resume in and the micro-batches of it that are done, and restore the loader.

        Args:
            native: what the trainer would return.
            max_steps: steps of the whole run.
            epochs: epochs of the whole run.
        """
        context = self.context
        if context is None:
            return native
        self.phase = SessionPhase.RESTORED
        if self._resumed is not None and self._resumed.later_state is not None:
            vars(self.trainer.state).update(json.loads(self._resumed.later_state))
        self._logged = len(self.trainer.state.log_history)
        self._set_intervals(context, max_steps)
        self._name_best()
        files.restore_callbacks(self.trainer)
        state = self._resumed
        if state is None:
            self.epoch = native[0] - 1
            self.data.skip(native[1])
            return native
        return self._restore_place(context, state, max_steps, epochs)

    def _set_intervals(self, context: RestoreContext, max_steps: int) -> None:
        """Set the intervals that this launch was given otherwise: the trainer goes by those of the checkpoint."""
        trainer, live = self.trainer, self.trainer.state
        asked: Any = TrainerState()
        settings = context.launch.settings if context.launch is not None else None
        before = settings.arguments if settings is not None else {}
        asked.compute_steps(trainer.args, max_steps)
        for name in ("logging_steps", "eval_steps", "save_steps"):
            if before.get(name, "") not in ("", as_text(getattr(trainer.args, name))):
                setattr(live, name, getattr(asked, name))
        live.train_batch_size = trainer._train_batch_size  # seam: transformers 4.57 to 5.23

    def _restore_place(
        self, context: RestoreContext, state: TrainerRankState, max_steps: int, epochs: int
    ) -> tuple[int, int]:
        live, rescale = self.trainer.state, self.session.rescale
        limit = self.limit(max_steps)
        at_end = live.global_step >= limit and not self.data.is_rebatched(state)
        if self.session.is_finished(live.global_step, limit):
            self.phase = SessionPhase.FINISHED
        self.is_over = at_end or (state.stopping and live.global_step < state.max_steps)
        ended = self.is_over or self.phase is SessionPhase.FINISHED
        consumed = self.data.restore(context, state, ended=ended)
        self._asked_steps, live.max_steps = max_steps + rescale.shift, self.limit(max_steps)
        self.is_over = self.is_over or live.global_step >= live.max_steps
        if self.phase is SessionPhase.FINISHED or (self.is_over and state.between_epochs):
            return epochs, 0
        assert state.position is not None, "a position was saved"
        next_epoch = state.between_epochs and (ended or state.position.ended)
        self.epoch = state.epoch if next_epoch else state.epoch - 1
        self.data.resume_at(0 if next_epoch else consumed, state.first_slice)
        return self.epoch + 1, self.data.consumed

    def limit(self, max_steps: int) -> int:
        """Return the steps after which the run ends: those that a callback had set, unless this launch asks for others.

        Args:
            max_steps: how many the arguments of this launch make.
        """
        asked, state = max_steps + self.session.rescale.shift, self._resumed
        return state.max_steps if state is not None and state.asked_steps == asked else asked

    def _name_best(self) -> None:
        """Set where the best checkpoint is now: the run directory may have moved."""
        live = self.trainer.state
        best = self.run.directory / f"checkpoint-{live.best_global_step}"
        as_given = Path(self.trainer.args.output_dir) / best.name
        live.best_model_checkpoint = str(as_given) if live.best_global_step and best.is_dir() else None

    def load_rng(self, native: Callable[[], None] = lambda: None) -> None:
        """Replace the trainer's own restore of the random state, which comes after the data were fetched.

        At the end it is called without one, where no epoch was left to restore it in.
        """
        if self._resumed is None:
            native()
        else:
            self.data.restore_rng()

    def begin_training(self, control: Any) -> None:
        """Restore what the trainer resets after it has loaded a checkpoint.

        Raises:
            UnsupportedSetting: the trainer has a loop of its own, which did not ask where to go on.
        """
        self._require_restored()
        self._started = time.monotonic()
        self.evaluation.begin()
        context = self.context
        if self._asked_steps is None:
            self._asked_steps = self.trainer.state.max_steps
        if context is not None:
            control.should_training_stop = self.is_over
            self.session.restorer.restore_parts(self.framework.parts())
            if self._resumed is not None:
                is_resharded = bool(self.session.loaders.topology_changes)
                self.framework.restore_running_values(context, self._resumed, is_resharded=is_resharded)
                self._initial_step = self._resumed.counters.initial_step
                self.seconds = self._resumed.counters.seconds
        else:
            self.session.fork()
        self.session.restorer.align_buckets()

    def conclude_start(self, *, in_epoch: bool) -> None:
        """Begin to observe, and verify what the trainer has loaded, when all callbacks have heard of the start; once.

        Of an epoch that resumes in its middle they hear again, and may do again what was done when it was saved.

        Args:
            in_epoch: they have heard of an epoch, too.

        Raises:
            NotRestored: the live state is not what was saved.
        """
        is_whole = self._resumed is None or self._resumed.between_epochs or self.phase is SessionPhase.FINISHED
        if self.session.observed.has_begun or not (is_whole or in_epoch):
            return
        self.session.begin_observing()  # first: what a model saves beside its tensors may be in an attribute alone
        if self.context is None:
            return
        files.restore_callbacks(self.trainer)
        self.framework.verify(self.context, self._restore_beside_files)
        self.session.move_schedules()

    def _restore_beside_files(self) -> None:
        self.session.restorer.restore_parts(self.framework.parts())
        self.session.observed.restore()

    def _require_restored(self) -> None:
        if self.context is not None and self.phase is SessionPhase.OPENED:
            raise UnsupportedSetting(
                f"{type(self.trainer).__name__} trains in a loop of its own, which begins at the start although "
                f"{self.context.path.name} was found: leave the callback out, or let the loop be the Trainer's"
            )

    # ---- Training

    def begin_epoch(self) -> None:
        """Count epochs; the micro-batches of a resumed one are counted on.

        Raises:
            UnsupportedSetting: see :meth:`begin_training`.
        """
        self._require_restored()
        self.epoch += 1
        if self.phase is SessionPhase.BETWEEN_EPOCHS:
            self.data.consumed = 0
        self.phase = SessionPhase.IN_EPOCH

    def window(self, batches: int) -> int:
        """Return the micro-batches of the next step: fewer, where samples of it were consumed in other steps."""
        accumulation = self.session.rescale.accumulation
        if self.trainer.args.gradient_accumulation_steps != accumulation:
            return batches  # the training has changed it since this launch began
        begun = self.data.consumed % accumulation
        if begun:
            self.session.begin_step()  # the trainer has no event for the beginning of such a step
        return min(batches, accumulation - begun)

    def end_step(self, control: Any) -> None:
        """Count the last micro-batch of a step, and ask whether to save or to stop.

        Where ``save_every`` is given, it decides about saving in the trainer's place.
        """
        self.data.consumed += 1
        engine = self.framework.engine
        if engine is not None:
            engine.has_stepped(self.session.trace)
        self.session.watch_script()
        live = self.trainer.state
        decision = self.session.end_step(live.global_step, live.epoch, live.max_steps)
        self._save_due, self._is_due_in_memory = decision.save, decision.save_to_memory
        if self._replaces_cadence:
            control.should_save = decision.save

    def end_epoch(self, control: Any) -> None:
        """What is saved from now on is saved between two epochs."""
        self.phase = SessionPhase.BETWEEN_EPOCHS
        if self._replaces_cadence:
            control.should_save = self._save_due

    def act(self, save: Callable[[], None], write: Callable[[], None]) -> None:
        """Save and leave where that is agreed on, when the trainer has done what was due after a step or an epoch.

        Args:
            save: saves a checkpoint through the trainer.
            write: lets the trainer write one that is in memory alone; no callback hears of it.
        """
        live = self.trainer.state
        is_saved = self.run.last_commit == live.global_step
        if (self._save_due or self.session.stopping) and not is_saved:
            save()
        elif self._is_due_in_memory and not is_saved:
            with replaced(self, "_saves_to_memory", True):
                write()
        self._save_due = self._is_due_in_memory = False
        if self.session.stopping:
            self.run.leave(live.global_step, live.epoch)
        self._keep()

    def _keep(self) -> None:
        """Hold the state of now, within a restartable block."""
        if self.session.held is not None and self.session.has_begun:
            step = self.trainer.state.global_step
            place = f"{self.phase.value}{', before an evaluation' if self.evaluation.is_due else ''}"
            saving, own = self.framework.saving_later(), self.framework.own_values()
            self.session.keep(step, self, SaveForm(f"checkpoint-{step}", place=place, saving=saving, own=own))

    def evaluate(self, native: Callable[[], dict[str, float]], *, at_start: bool) -> dict[str, float]:
        """Evaluate; before the first step (``eval_on_start``), only where nothing is resumed: it was done then.

        Args:
            native: the trainer's own way.
            at_start: no step was done in this call.
        """
        if at_start and self.context is not None:
            return {}
        return self.evaluation.evaluate(native, self._keep)

    def evaluate_again(self) -> bool:
        """Do the evaluation that the checkpoint says is due, before the first step.

        Returns:
            Whether no epoch is left to train: the evaluation, between two epochs, ended the training.
        """
        state = self._resumed
        if state is None or state.evaluation is None:
            return False
        due, state.evaluation = state.evaluation, None
        moment = _random_state(state)
        trainer = self.trainer
        self.session.restore_random_state(moment)
        control = trainer.control
        control.should_log, control.should_evaluate, control.should_save = False, True, due.save
        trainer._maybe_log_save_evaluate(  # seam: transformers 4.57 to 5.23
            tr_loss=trainer._tr_loss,
            grad_norm=None,
            model=trainer.model_wrapped,
            trial=None,
            epoch=trainer.state.epoch,
            ignore_keys_for_eval=self.evaluation.ignore_keys,
            start_time=None,
        )
        moment.update(self.session.random_state())
        if self.is_over or not trainer.control.should_training_stop:
            return False
        self.is_over = True
        if not state.between_epochs:
            self.data.end_pass(state)
        return state.between_epochs

    # ---- Saving

    def save(self, native: Callable[[], None]) -> None:
        """Save a checkpoint of the current step around the trainer's own save."""
        if self.session.loaders.topology_changes and not self.session.has_begun:
            return  # an evaluation was done again; where the data resume in this topology shows with the first batch
        step = self.trainer.state.global_step
        self._keep()
        to_memory = self._saves_to_memory
        self._logged = self._logged if to_memory else len(self.trainer.state.log_history)
        with self.framework.saving(native, pushes=not to_memory):
            self.session.save(f"checkpoint-{step}", step, self, to_memory=to_memory)

    def is_saved_for_callbacks(self) -> bool:
        """Return whether the callbacks may hear of the last save. Where one of them acts on it, wait for its commit.

        A callback may remove the checkpoints before it, and a kill would leave none.
        """
        if not any(self.run.ranks.gather(bool(self.framework.readers()))):
            return True
        self.run.saver.drain()
        return bool(self.run.last_commit == self.trainer.state.global_step)

    def rank_state(self) -> TrainerRankState:
        """Return what this rank saves for itself."""
        trainer, state = self.trainer, self._resumed
        later_state = files.state_text(trainer) if self._saves_again else None
        if not self.session.has_begun and state is not None:  # an evaluation was done again: nothing else has moved
            _random_state(state).update(self.session.random_state())
            state.evaluation_workers = self.evaluation.worker_names()
            state.evaluation_loaders = self.evaluation.running_workers()
            state.evaluation_data = self.evaluation.changed_data()
            state.later_state = later_state
            return state
        between_epochs, stopping = self.phase is SessionPhase.BETWEEN_EPOCHS, trainer.control.should_training_stop
        due = DueEvaluation(trainer.control.should_save) if self.evaluation.is_due else None
        return TrainerRankState(
            **vars(self.data.state(between_epochs=between_epochs, stopping=stopping)),
            epoch=self.epoch,
            first_slice=None if between_epochs else self.data.first_slice(),
            between_epochs=between_epochs,
            stopping=stopping,
            max_steps=trainer.state.max_steps,
            asked_steps=self._asked_steps,
            engine=None if self.framework.engine is None else self.framework.engine.rank_state(),
            evaluation=due,
            evaluation_workers=self.evaluation.worker_names(),
            evaluation_loaders=self.evaluation.running_workers(),
            evaluation_data=self.evaluation.changed_data(),
            counters=self._counters(),
            later_state=later_state,
        )

    def _counters(self) -> TrainerCounters:
        trainer = self.trainer
        return TrainerCounters(
            tr_loss=trainer._tr_loss,
            total_loss=trainer._total_loss_scalar,
            last_logged=trainer._globalstep_last_logged,
            initial_step=self._initial_step,
            seconds=self.seconds + time.monotonic() - self._started,
        )

    def parts(self) -> dict[str, Stateful]:
        """Return what of the weights the trainer's files do not bring back, and digests of what they have otherwise."""
        beside = self.framework.beside_files()
        return {} if beside is None else {LIVE_WEIGHTS: StaticState(beside)}

    def facts(self) -> CheckpointFacts:
        """Return what the manifest says of this checkpoint."""
        live = self.trainer.state
        best = f"checkpoint-{live.best_global_step}" if live.best_global_step else None
        return CheckpointFacts(float(live.epoch), self.evaluation.metrics(), best)

    def describe(self) -> list[PartEntry]:
        """Return an entry for each part of the call, and for workers that nobody captures."""
        return [
            *self.session.part_entries.captured(self.framework.parts(), counters="running loss and elapsed time"),
            *self.evaluation.missing(),
        ]

    # ---- Ending

    def save_last(self, save: Callable[[], None]) -> None:
        """Save the last step where it is not saved, and what the end of its epoch logged since: an evaluation, say."""
        self.load_rng()
        self.session.begin_ending()
        live = self.trainer.state
        if self.run.last_commit != live.global_step:
            save()
        elif all(self.run.ranks.gather(self._has_logged())):
            # The trainer's own files stay those of its last save, as where nobody resumes.
            name = f"checkpoint-{live.global_step}"
            with replaced(self, "_saves_again", True), self.framework.saving_again(self.run.directory / name):
                self.session.save(name, live.global_step, self)
        self.run.saver.flush()

    def _has_logged(self) -> bool:
        """Return whether a whole epoch logged more after the last save; within one, a longer run would not."""
        position = self.rank_state().position if len(self.trainer.state.log_history) > self._logged else None
        return position is not None and position.ended

    def finish(self, native: Callable[[], Any]) -> Any:
        """Finish as the trainer does, and set the run's state to finished."""
        output = native()
        live = self.trainer.state
        self.session.finish(
            self._extent,
            step=live.global_step,
            epoch=live.epoch,
            horizon=live.max_steps,
            result=finite_metrics(output.metrics),
        )
        return output

    def _why_finished(self) -> str:
        args, live = self.trainer.args, self.trainer.state
        if live.global_step < live.max_steps:
            return "a callback had set control.should_training_stop"
        if live.max_steps != self._asked_steps:
            return f"a callback had set state.max_steps={live.max_steps}"
        return f"max_steps={args.max_steps}" if args.max_steps > 0 else f"num_train_epochs={args.num_train_epochs:g}"

    def former_result(self) -> Any:
        """Return what the finished run returned; its weights are loaded, and nothing is trained."""
        former, trainer = self.run.previous, self.trainer
        assert former is not None, "an earlier launch has finished the run"
        self.load_rng()
        self.session.log_finished(former.step, self._why_finished())
        if trainer.args.load_best_model_at_end and trainer.state.best_model_checkpoint is not None:
            trainer._load_best_model()  # seam: transformers 4.57 to 5.23, as _finalize_training does
        metrics: dict[str, Any] = {**former.result}
        # As _finalize_training, which logs it as well.
        trainer.state.log_history.append({**metrics, "total_flos": trainer.state.total_flos, "step": former.step})
        trainer.control = trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
        trainer.is_in_train = False
        self.session.finish(
            self._extent, step=former.step, epoch=former.epoch, horizon=former.horizon, result=former.result
        )
        loss = former.result.get("train_loss")
        return TrainOutput(former.step, math.nan if loss is None else loss, metrics)

    def close(self) -> None:
        """Undo what the call patched, started and registered."""
        self.session.close(self.data.close, self.evaluation.workers.close)


def _extent(trainer: Any) -> Extent:
    """Return how far a trainer is asked to train, and on what."""
    args, trained = trainer.args, [each for each in trainer.model.parameters() if each.requires_grad]
    epochs, steps = (None, args.max_steps) if args.max_steps > 0 else (args.num_train_epochs, None)
    content = {"samples in the dataset": length_of(trainer.train_dataset), "trained tensors": len(trained)}
    return Extent(epochs, steps, content)


def _random_state(state: TrainerRankState) -> dict[str, Any]:
    """Return the random state of the moment at which a rank saved; changing it changes what is saved next."""
    assert state.position is not None and state.position.step is not None, "the random state was saved"
    return state.position.step
