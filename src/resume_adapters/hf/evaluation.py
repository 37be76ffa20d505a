"""The evaluations of one call of ``Trainer.train``: interrupted for a stop, and done again after the resume."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader

from resume_adapters.core.checkpoint.manifest import PartEntry, finite_metrics
from resume_adapters.core.dataloader.evaluated import EvaluatedData, datasets_of
from resume_adapters.core.dataloader.instrument import are_kept
from resume_adapters.core.dataloader.progress import LoaderPosition
from resume_adapters.core.dataloader.sampler import length_of
from resume_adapters.core.dataloader.tracked import TrackedLoader, track
from resume_adapters.core.log import logger
from resume_adapters.core.observed.loaders import content_of
from resume_adapters.core.session.loaders import missing_lines
from resume_adapters.core.session.session import Session
from resume_adapters.core.state import rng
from resume_adapters.hf.records import EvaluationLoader


class EvaluationInterrupted(Exception):
    """Leads out of an evaluation that a stop has interrupted."""


class InterruptibleEvaluation:
    """The evaluations of a trainer.

    Args:
        ignore_keys: what the user gave ``train()`` as ``ignore_keys_for_eval``.

    Attributes:
        data: what changes on the data as they are read.
        is_due: an evaluation was interrupted, and is to be done again.
        ignore_keys: see above.
    """

    def __init__(self, trainer: Any, session: Session, ignore_keys: list[str] | None) -> None:
        self.data = EvaluatedData()
        self.is_due = False
        self.ignore_keys = ignore_keys
        self._trainer = trainer
        self._session = session
        self._is_interruptible = False
        self._workers_before: list[EvaluationLoader] = []
        self._data_before: dict[str, list[Any]] = {}
        self._to_restore: dict[str, LoaderPosition | None] = {}
        self._tracked: dict[str, TrackedLoader] = {}
        self._untracked: set[str] = set()
        self._metrics: Mapping[str, float | None] = {}
        self._evaluated_at: int | None = None

    # ---- Loaders

    def restore_workers(self, names: Sequence[str], loaders: Sequence[EvaluationLoader] | None) -> None:
        """Restore the persistent workers of evaluation loaders when the trainer asks for these.

        Args:
            names: the names of all whose workers were running.
            loaders: those of which the state was saved.
        """
        self._to_restore = dict.fromkeys(names) | {each.name: each.position for each in loaders or ()}

    def loader(self, name: str, native: Callable[[], Any]) -> Any:
        """Return an evaluation loader; where its workers outlive a pass, tracked, and restored if they were running."""
        found = native()
        torch_loader = getattr(found, "base_dataloader", found)
        held = self._trainer.train_dataset
        trained = [held, *datasets_of(held), self._trainer.data_collator]
        dataset = getattr(torch_loader, "dataset", None)
        self.data.watch(f"the evaluation loader {name!r}", dataset, content_of(dataset, None), trained)
        if not _outlives_a_pass(torch_loader):
            self._to_restore.pop(name, None)
            return found
        if are_kept(torch_loader) and not hasattr(torch_loader, "resume_tracked"):
            self._untracked.add(name)  # started before the training, its workers do not send their state
            return found
        tracked = self._tracked[name] = track(torch_loader, self._session.options.generators)
        if name in self._to_restore:
            self._restore(name, tracked, self._to_restore.pop(name))
        return found

    def _restore(self, name: str, tracked: TrackedLoader, position: LoaderPosition | None) -> None:
        if position is None:  # an earlier version saved no more than that they were running
            before = rng.capture_cpu()
            iter(tracked.loader)
            rng.restore_cpu(before)
        elif tracked.differences(position) or position.length != length_of(tracked.loader.dataset):
            logger.warning(
                "The evaluation loader %r had a different dataset, batch size or number of workers when the checkpoint "
                "was saved: the random state of its workers starts over.",
                name,
            )
        else:
            tracked.restore(position)
            tracked.restore_now(process=False)

    def workers(self) -> list[EvaluationLoader]:
        """Return the evaluation loaders whose persistent workers a resume must restore."""
        return self._workers_before if self.is_due else self._workers_now()

    def _workers_now(self) -> list[EvaluationLoader]:
        waiting = {name: position for name, position in self._to_restore.items() if position is not None}
        running = {name: each.position_between() for name, each in self._tracked.items() if are_kept(each.loader)}
        return [EvaluationLoader(name, position) for name, position in {**waiting, **running}.items()]

    def changed_data(self) -> dict[str, list[Any]]:
        """Return what is known to change on the data, as it is where the next evaluation begins."""
        return self._data_before if self.is_due else self.data.capture()

    def worker_names(self) -> list[str]:
        """Return the names of those loaders, and of those that are known by their name only."""
        named = [name for name, position in self._to_restore.items() if position is None]
        return [*named, *(each.name for each in self.workers())]

    def missing(self) -> list[PartEntry]:
        """Return an entry for what changes and is not captured, and for loaders whose workers had been started."""
        changing = [PartEntry("data", "missing", line) for line in missing_lines(self.data.missing)]
        return changing + [
            PartEntry(
                "data",
                "missing",
                f"the random state of the persistent workers of the evaluation loader {name!r}, which were started "
                "before train(): after a resume it starts over. Evaluate first with another trainer, or leave "
                "dataloader_persistent_workers at False",
            )
            for name in sorted(self._untracked)
        ]

    def close(self) -> None:
        """Detach the loaders from the run. They stay tracked: their workers may be running."""
        while self._tracked:
            self._tracked.popitem()[1].release()

    # ---- Evaluating

    def evaluate(self, native: Callable[[], dict[str, float]], keep: Callable[[], None]) -> dict[str, float]:
        """Evaluate; where a stop is agreed on, interrupt it and restore the random state of before.

        Args:
            native: the trainer's own way.
            keep: holds the state of now, with this evaluation due, within a restartable block.

        Raises:
            EvaluationInterrupted: it was interrupted.
        """
        self._workers_before, self._data_before = self._workers_now(), self.data.capture()
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


def _outlives_a_pass(loader: Any) -> bool:
    """Return whether a loader is one of torch whose workers outlive its passes, in an order that can be repeated."""
    is_kept = isinstance(loader, DataLoader) and loader.num_workers > 0 and loader.persistent_workers
    return is_kept and getattr(loader, "in_order", True)
