"""The evaluations of one call of ``Trainer.train``: interrupted for a stop, and done again after the resume."""

from __future__ import annotations

import functools
import gc
import types
from collections.abc import Callable, Mapping
from typing import Any

from resume_adapters.core.checkpoint.manifest import PartEntry, finite_metrics
from resume_adapters.core.dataloader.evaluated import (
    EvaluatedData,
    EvaluationLoader,
    EvaluationWorkers,
    datasets_of,
    order_parts,
)
from resume_adapters.core.observed.loaders import content_of
from resume_adapters.core.session.loaders import missing_lines
from resume_adapters.core.session.session import Session
from resume_adapters.core.state.untouched import is_a


class EvaluationInterrupted(Exception):
    """Leads out of an evaluation that a stop has interrupted."""


class InterruptibleEvaluation:
    """The evaluations of a trainer.

    Args:
        ignore_keys: what the user gave ``train()`` as ``ignore_keys_for_eval``.

    Attributes:
        data: what changes on the data as they are read.
        workers: the loaders' persistent workers.
        is_due: an evaluation was interrupted, and is to be done again.
        ignore_keys: see above.
    """

    def __init__(self, trainer: Any, session: Session, ignore_keys: list[str] | None) -> None:
        self.data, self.workers = EvaluatedData(), EvaluationWorkers()
        self.is_due = False
        self.ignore_keys = ignore_keys
        self._trainer = trainer
        self._session = session
        self._is_interruptible = False
        self._workers_before: list[EvaluationLoader] = []
        self._data_before: dict[str, list[Any]] = {}
        self._metrics: Mapping[str, float | None] = {}
        self._evaluated_at: int | None = None

    # ---- Loaders

    def loader(self, name: str, native: Callable[[], Any], *, is_own: bool) -> Any:
        """Return an evaluation loader; where its workers outlive a pass, tracked, and restored if they were running.

        Args:
            is_own: a subclass makes it, and may keep it; the trainer makes one for each evaluation.
        """
        found = native()
        torch_loader = getattr(found, "base_dataloader", found)
        self._watch(name, getattr(torch_loader, "dataset", None))
        if is_own and self._is_kept(found, torch_loader):
            self.data.watch(f"{name!r}", torch_loader, functools.partial(order_parts, torch_loader), self._trained())
        self.workers.watch(name, torch_loader)
        return found

    def _is_kept(self, *loaders: Any) -> bool:
        """Return whether something refers to one of these, each within the one before, so that it is read again."""
        holders = [each for each in gc.get_referrers(*loaders) if not is_a(each, types.FrameType)]
        prepared = self._trainer.accelerator._dataloaders  # seam: accelerate 1.15
        known = [loaders, prepared, *loaders, *map(vars, loaders)]
        return any(all(holder is not each for each in known) for holder in holders)

    def begin(self) -> None:
        """Restore the data of the trainer's evaluations: the training may draw from what these draw from."""
        found = self._trainer.eval_dataset
        for name, dataset in (found if isinstance(found, dict) else {"eval": found}).items():
            self._watch(name, dataset)

    def _watch(self, name: str, dataset: Any) -> None:
        parts = functools.partial(content_of, dataset, None)
        self.data.watch(f"the evaluation loader {name!r}", dataset, parts, self._trained())

    def _trained(self) -> list[Any]:
        held = self._trainer.train_dataset
        return [held, *datasets_of(held), self._trainer.data_collator]

    def running_workers(self) -> list[EvaluationLoader]:
        """Return the evaluation loaders whose persistent workers a resume must restore."""
        return self._workers_before if self.is_due else self.workers.capture()

    def changed_data(self) -> dict[str, list[Any]]:
        """Return what is known to change on the data, as it is where the next evaluation begins."""
        return self._data_before if self.is_due else self.data.capture()

    def worker_names(self) -> list[str]:
        """Return the names of those loaders, and of those that are known by their name only."""
        return [*self.workers.unknown, *(each.name for each in self.running_workers())]

    def missing(self) -> list[PartEntry]:
        """Return an entry for what changes and is not captured."""
        return [PartEntry("data", "missing", line) for line in missing_lines(self.data.missing)]

    # ---- Evaluating

    def evaluate(self, native: Callable[[], dict[str, float]], keep: Callable[[], None]) -> dict[str, float]:
        """Evaluate; where a stop is agreed on, interrupt it and restore the random state of before.

        Args:
            native: the trainer's own way.
            keep: holds the state of now, with this evaluation due, within a restartable block.

        Raises:
            EvaluationInterrupted: it was interrupted.
        """
        self._workers_before, self._data_before = self.workers.capture(), self.data.capture()
        before = self._session.random_state()
        self._session.observed.hold()
        self.is_due = True
        keep()
        self.is_due = False
        try:
            if self._session.stopping:
                raise EvaluationInterrupted
            result = native()
            self.data.look()
            self._session.require_metrics(result)
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

    def run_interruptible(self, native: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Log, evaluate and save as is due; an interrupted evaluation is due in the next launch."""
        self._is_interruptible = True
        try:
            native(*args, **kwargs)
        except EvaluationInterrupted:
            self.is_due = True
        finally:
            self._is_interruptible = False

    def end(self, metrics: dict[str, Any], control: Any) -> None:
        """Keep the metrics, and let a new best force a save: the trainer takes it for the best whether saved or not."""
        args, live = self._trainer.args, self._trainer.state
        # The evaluation of several datasets has an event for each of them.
        self._metrics, self._evaluated_at = {**self.metrics(), **finite_metrics(metrics)}, live.global_step
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
                self._session.reason = "best"

    def metrics(self) -> dict[str, float | None]:
        """Return the metrics of this step's weights; none of an earlier step, by which retention would rank them."""
        return dict(self._metrics) if self._evaluated_at == self._trainer.state.global_step else {}
