"""One call of ``Trainer.train``, translated into the core's verbs."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any

from transformers.trainer_utils import TrainOutput

from resume_adapters.core.checkpoint.manifest import PartEntry, finite_metrics
from resume_adapters.core.session.messages import log_finished
from resume_adapters.hf import files
from resume_adapters.hf.evaluation import Evaluations


class TrainerSession(Evaluations):
    """One call of ``train()`` on a trainer that has a :class:`~resume_adapters.hf.ResumeCallback`."""

    # ---- Training

    def begin_epoch(self) -> None:
        """Count epochs; the micro-batches of a resumed one go on from where they were."""
        self.epoch += 1
        if self.between_epochs:
            self.consumed = 0
        self.between_epochs = False

    def window(self, batches: int) -> int:
        """Return the micro-batches of the next step: fewer, where samples of it were consumed in other steps."""
        begun = self.consumed % self.batch_change.accumulation
        if begun:
            self.begin_step()  # the trainer has no event for the beginning of such a step
        return min(batches, self.batch_change.accumulation - begun)

    def step_ended(self, control: Any) -> None:
        """Count the micro-batch, and ask whether to save or to stop."""
        self.consumed += 1
        if self.engine is not None:
            self.engine.has_stepped()
        live = self.trainer.state
        decision = self.end_step(live.global_step, live.epoch, live.max_steps)
        self.saving = decision.save
        self.apply_cadence(control)

    def apply_cadence(self, control: Any) -> None:
        """Let ``save_every``, where it is given, decide about saving in the trainer's place."""
        if self.replaces_cadence:
            control.should_save = self.saving

    def log_evaluate_save(self, native: Callable[[], None], save: Callable[[], None]) -> None:
        """Let the trainer do what is due after a step or an epoch; then save and leave where that is agreed on."""
        self.evaluate_as_due(native)
        self._save_or_leave(save)

    # ---- Saving

    def save(self, native: Callable[[], None]) -> None:
        """Save a checkpoint of the current step around the trainer's own save."""
        if self.moved and not self.under_way:
            return  # an evaluation was done again, and where the data go on in this topology shows with the first batch
        live = self.trainer.state
        best = f"checkpoint-{live.best_global_step}" if live.best_global_step else None
        self.save_checkpoint(
            f"checkpoint-{live.global_step}",
            live.global_step,
            model=self.engine or self.trainer.model,
            native=functools.partial(self._save_natively, native),
            own=self._own,
            parts=self._further_parts(),
            owner=files.owner,
            entries=self._entries,
            facts=self._facts,
            best=best,
        )

    def _save_natively(self, native: Callable[[], None]) -> None:
        with contextlib.nullcontext() if self.engine is None else self.engine.data_only():
            native()

    def _own(self) -> dict[str, Any]:
        trainer, watch = self.trainer, self.loader_watch
        assert watch is not None
        if not self.under_way and self.own is not None:  # an evaluation was done again: nothing else has moved
            self.own["position"]["step"].update(self.random_state())
            return {**self.own, "evaluation_workers": files.evaluation_workers(trainer)}
        stopping = trainer.control.should_training_stop
        used = min(self.consumed * self.share, watch.fetched)
        whole = self.between_epochs and (not stopping or (watch.exhausted and used == watch.fetched))
        return {
            **self.loader_state(
                watch.position_between() if whole else watch.position(used), self.consumed, self.together
            ),
            "epoch": self.epoch,
            "first_slice": self.first_slice.kept if self.first_slice and not self.between_epochs else None,
            "between_epochs": self.between_epochs,
            "stopping": stopping,
            "max_steps": trainer.state.max_steps,
            "engine": None if self.engine is None else self.engine.own(),
            "evaluation": {"save": trainer.control.should_save} if self.evaluation_due else None,
            "evaluation_workers": self.workers_before if self.evaluation_due else files.evaluation_workers(trainer),
            "counters": {
                "tr_loss": trainer._tr_loss,
                "total_loss": trainer._total_loss_scalar,
                "last_logged": trainer._globalstep_last_logged,
                "initial_step": self.initial_step,
                "seconds": self.seconds + time.monotonic() - self.started,
            },
        }

    def _facts(self) -> dict[str, Any]:
        live = self.trainer.state
        return {
            "epoch": float(live.epoch),
            # Metrics of an earlier step say nothing of these weights, and retention would rank them by it.
            "metrics": self.metrics if self.evaluated_at == live.global_step else {},
        }

    def _entries(self) -> list[PartEntry]:
        trainer = self.trainer
        places = {"train_dataset": trainer.train_dataset, "data_collator": trainer.data_collator}
        return [
            *files.entries(trainer),
            *self.entries(self._further_parts(), counters="running loss and elapsed time"),
            *self.missing_generators(places, "ResumeCallback"),
        ]

    # ---- Ending

    def _save_or_leave(self, save: Callable[[], None]) -> None:
        """Save where that is due and the trainer did not; leave the process if a stop was agreed on."""
        live = self.trainer.state
        if (self.saving or self.stopping) and self.run.last_commit != live.global_step:
            save()
        self.saving = False
        if self.stopping:
            self.run.leave(live.global_step, live.epoch)

    def save_last(self, save: Callable[[], None]) -> None:
        """Save the last step where it is not saved."""
        self._restore_rng_of_the_end()
        if self.run.last_commit != self.trainer.state.global_step:
            self.reason = "finished"
            save()
        self.run.flush()

    def finish(self, native: Callable[[], Any]) -> Any:
        """Finish as the trainer does, and remember that the run is finished."""
        output = native()
        live = self.trainer.state
        self.run.record(
            "finished",
            step=live.global_step,
            epoch=live.epoch,
            horizon=live.max_steps,
            result=finite_metrics(output.metrics),
        )
        return output

    def _restore_rng_of_the_end(self) -> None:
        """Put the random state back where no epoch was left to do it in."""
        if self.own is not None and self.loader_watch is not None and not self.loader_watch.restored:
            self.loader_watch.restore_now()

    def former_result(self) -> Any:
        """Return what the finished run returned; its weights are loaded, and nothing is trained."""
        former, trainer = self.run.previous, self.trainer
        assert former is not None
        self._restore_rng_of_the_end()
        log_finished(former.step)
        if trainer.args.load_best_model_at_end and trainer.state.best_model_checkpoint is not None:
            trainer._load_best_model()  # seam: transformers 4.57 to 5.23, as _finalize_training does
        trainer.control = trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
        trainer.is_in_train = False
        self.run.record("finished", step=former.step, epoch=former.epoch, horizon=former.horizon, result=former.result)
        return TrainOutput(former.step, former.result["train_loss"], dict(former.result))
