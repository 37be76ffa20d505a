"""The evaluations of one call of ``Trainer.train``: given up for a stop, and done again after the resume."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from resume_adapters.core.checkpoint.manifest import finite_metrics
from resume_adapters.core.state import rng
from resume_adapters.hf import files
from resume_adapters.hf.restore import Restoration


class EvaluationGivenUp(Exception):
    """Leads out of an evaluation that a stop has overtaken."""


class Evaluations(Restoration):
    """What a :class:`~resume_adapters.hf.session.TrainerSession` knows of its evaluations.

    Attributes:
        evaluation_due: an evaluation was given up, and is to be done again.
        ignore_keys: what the user gave ``train()`` as ``ignore_keys_for_eval``.
        workers_before: the evaluation loaders whose persistent workers ran before the last evaluation.
        metrics: what the last evaluation found.
        evaluated_at: the step of it.
    """

    evaluation_due = False
    ignore_keys: list[str] | None = None
    workers_before: Sequence[str] = ()
    metrics: Mapping[str, float | None] = {}
    evaluated_at: int | None = None
    _may_give_up = False

    def evaluation_loader(self, key: str, native: Callable[[], Any]) -> Any:
        """Start the persistent workers of an evaluation loader again, if they were running, and draw no number."""
        found = native()
        if self.own is not None and key in self.own["evaluation_workers"]:
            self.own["evaluation_workers"].remove(key)
            before = rng.capture_cpu()
            iter(found.base_dataloader)
            rng.restore_cpu(before)
        return found

    def evaluate(self, native: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Evaluate; give it up, with the random state of before, where a stop is agreed on before or on the way.

        Raises:
            EvaluationGivenUp: it was given up.
        """
        self.workers_before = files.evaluation_workers(self.trainer)
        before = self.random_state()
        try:
            if self.stopping:
                raise EvaluationGivenUp
            return native()
        except EvaluationGivenUp:
            self.restore_random_state(before)
            raise

    def predicted(self) -> None:
        """Between the batches of an evaluation that is part of the training, ask whether to stop.

        Raises:
            EvaluationGivenUp: the ranks stop.
        """
        if self._may_give_up and self.ask_to_stop():
            raise EvaluationGivenUp

    def evaluate_as_due(self, native: Callable[[], None]) -> None:
        """Let the trainer do what is due; an evaluation that is given up is due again in the next launch."""
        self._may_give_up = True
        try:
            native()
        except EvaluationGivenUp:
            self.evaluation_due = True
        finally:
            self._may_give_up = False

    def evaluate_again(self) -> bool:
        """Do the evaluation that the checkpoint says is due, before the first step.

        Returns:
            Whether no epoch is left to train: the evaluation, between two epochs, ended the training.
        """
        due = self.own.pop("evaluation", None) if self.own else None
        if due is None:
            return False
        trainer, position = self.trainer, self.own["position"]
        self.restore_random_state(position["step"])
        control = trainer.control
        control.should_log, control.should_evaluate, control.should_save = False, True, due["save"]
        trainer._maybe_log_save_evaluate(  # seam: transformers 4.57 to 5.23
            tr_loss=trainer._tr_loss,
            grad_norm=None,
            model=trainer.model_wrapped,
            trial=None,
            epoch=trainer.state.epoch,
            ignore_keys_for_eval=self.ignore_keys,
            start_time=None,
        )
        position["step"].update(self.random_state())
        if self.over or not trainer.control.should_training_stop:
            return False
        self.over = True
        if not self.own["between_epochs"]:
            assert self.loader_watch is not None
            self.loader_watch.restore({**position, "ended": True})
        return bool(self.own["between_epochs"])

    def evaluated(self, metrics: dict[str, Any], control: Any) -> None:
        """Note the metrics, and let a new best force a save: the trainer takes it for the best whether saved or not."""
        args, live = self.trainer.args, self.trainer.state
        self.metrics, self.evaluated_at = finite_metrics(metrics), live.global_step
        if args.metric_for_best_model is None:
            return
        name = args.metric_for_best_model
        value = metrics.get(name if name.startswith("eval_") else f"eval_{name}")
        if value is None:
            return
        worst = float("-inf") if args.greater_is_better else float("inf")
        best = worst if live.best_metric is None else live.best_metric
        if value > best if args.greater_is_better else value < best:
            control.should_save = True
            if not self.stopping:
                self.reason = "best"
