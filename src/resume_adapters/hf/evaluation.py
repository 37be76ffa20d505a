"""The evaluations of one call of ``Trainer.train``: interrupted for a stop, and done again after the resume."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from resume_adapters.core.checkpoint.manifest import finite_metrics
from resume_adapters.core.session.session import Session
from resume_adapters.core.state import rng
from resume_adapters.hf import files


class EvaluationInterrupted(Exception):
    """Leads out of an evaluation that a stop has interrupted."""


class InterruptibleEvaluation:
    """The evaluations of a trainer.

    Args:
        trainer: the trainer.
        session: the session.
        ignore_keys: what the user gave ``train()`` as ``ignore_keys_for_eval``.

    Attributes:
        is_due: an evaluation was interrupted, and is to be done again.
        ignore_keys: see above.
    """

    def __init__(self, trainer: Any, session: Session, ignore_keys: list[str] | None) -> None:
        self.is_due = False
        self.ignore_keys = ignore_keys
        self._trainer = trainer
        self._session = session
        self._is_interruptible = False
        self._workers_before: Sequence[str] = ()
        self._workers_to_start: set[str] = set()
        self._metrics: Mapping[str, float | None] = {}
        self._evaluated_at: int | None = None

    # ---- Loaders

    def restore_workers(self, names: Sequence[str]) -> None:
        """Let the evaluation loaders of these names start their persistent workers when the trainer asks for them."""
        self._workers_to_start = set(names)

    def loader(self, name: str, native: Callable[[], Any]) -> Any:
        """Return an evaluation loader; start its workers if they were running, without drawing a random number."""
        found = native()
        if name in self._workers_to_start:
            self._workers_to_start.remove(name)
            before = rng.capture_cpu()
            iter(found.base_dataloader)
            rng.restore_cpu(before)
        return found

    def workers(self) -> list[str]:
        """Return the names of the evaluation loaders whose persistent workers a resume must start."""
        return list(self._workers_before) if self.is_due else files.evaluation_workers(self._trainer)

    # ---- Evaluating

    def evaluate(self, native: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Evaluate; where a stop is agreed on, interrupt it and restore the random state of before.

        Raises:
            EvaluationInterrupted: it was interrupted.
        """
        self._workers_before = files.evaluation_workers(self._trainer)
        before = self._session.random_state()
        self._session.observed.hold()
        try:
            if self._session.stopping:
                raise EvaluationInterrupted
            result = native()
            self._session.observed.release()
            return result
        except EvaluationInterrupted:  # what is observed stays held: the evaluation is done again from its start
            self._session.restore_random_state(before)
            raise

    def end_batch(self) -> None:
        """Between the batches of an evaluation that is part of the training, ask whether to stop.

        Raises:
            EvaluationInterrupted: the ranks stop.
        """
        if self._is_interruptible and self._session.ask_to_stop():
            raise EvaluationInterrupted

    def run_interruptible(self, native: Callable[[], None]) -> None:
        """Let the trainer log, evaluate and save as is due; an interrupted evaluation is due in the next launch."""
        self._is_interruptible = True
        try:
            native()
        except EvaluationInterrupted:
            self.is_due = True
        finally:
            self._is_interruptible = False

    def end(self, metrics: dict[str, Any], control: Any) -> None:
        """Keep the metrics, and let a new best force a save: the trainer takes it for the best whether saved or not."""
        args, live = self._trainer.args, self._trainer.state
        self._metrics, self._evaluated_at = finite_metrics(metrics), live.global_step
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
            if not self._session.stopping:
                self._session.set_reason("best")

    def metrics(self) -> dict[str, float | None]:
        """Return the metrics of this step's weights; none of an earlier step, by which retention would rank them."""
        return dict(self._metrics) if self._evaluated_at == self._trainer.state.global_step else {}
