"""One call of ``Trainer.fit``, translated into the core's verbs."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from resume_adapters.core.checkpoint.layout import is_committed, is_pending
from resume_adapters.core.checkpoint.manifest import PartEntry, finite_metrics
from resume_adapters.core.state.rng import GeneratorState
from resume_adapters.lightning import engine, files, gradients, logged_values, model_checkpoints, module_state
from resume_adapters.lightning.checkpoint_io import ResumeCheckpointIO, without_code
from resume_adapters.lightning.loops import DUE, END, EPOCH, IN_EPOCH, VALIDATION
from resume_adapters.lightning.restore import Restoration


class FitSession(Restoration):
    """One call of ``fit()`` on a trainer that has a :class:`~resume_adapters.lightning.ResumeCallback`."""

    _askings: float = 0
    _before: dict[str, Any] | None = None
    _fingerprint: str | None = None

    # ---- Training

    def take_signals(self) -> None:
        """Take the signals from Lightning, whose handlers act in the middle of a step."""
        self.run.flag.uninstall()
        self.run.flag.install()

    def begin_training(self) -> None:
        """Take the signals, and note the order of DDP's gradients."""
        self.take_signals()
        if self.engine is not None:
            engine.require_whole_windows(self.trainer)
        if self.own is None:
            self.align_buckets(self.trainer.model)
        expected = self.trainer.estimated_stepping_batches
        self._steps = int(expected) if math.isfinite(expected) and expected > 0 else None

    def end_batch(self) -> None:
        """At an optimizer step, ask whether to save, and whether to stop."""
        if self.loops.is_accumulating:
            return
        if self.engine is not None:
            self.engine.has_stepped()
        horizon = None if self._steps is None else self._steps + self.batch_change.shift
        decision = self.end_step(self.trainer.global_step, self._epoch(), horizon)
        if decision.save:
            self._save_if_needed()
        self.leave_if_asked()

    def validate(self, native: Callable[[], Any]) -> Any:
        """Validate, and keep what this changes: a stop in the middle saves the moment before, and it is done again."""
        batches = self.loops.validation_batches()
        alone = self.run.ranks.world_size == 1
        # Ranks ask together, so no more often than the one of the fewest batches can.
        self._askings = math.inf if alone else min(self.run.ranks.gather(batches))
        if not self.trainer.sanity_checking:
            self.moment = DUE
            self._before = self._state()
            if self._askings and not self._is_saved:
                self._fingerprint = self._take_fingerprint()
        result = native()
        self._before = self._fingerprint = None
        return result

    def end_validation_batch(self) -> None:
        """Between the batches of a validation, ask whether to stop, and leave where nothing is lost by it.

        Where something has changed what would be saved, as averages that take the place of the weights do, the
        validation comes to its end first.

        Raises:
            Stopped: the ranks stop.
        """
        if self._askings <= 0:
            return
        self._askings -= 1
        if not self.ask_to_stop():
            return
        self._askings = 0
        if self.trainer.sanity_checking:
            self.run.leave(self.trainer.global_step, self._epoch())
        if self._is_saved or all(self.run.ranks.gather(self._is_as_before())):
            self.leave_if_asked()

    def _is_as_before(self) -> bool:
        return self._fingerprint is not None and self._fingerprint == self._take_fingerprint()

    def _take_fingerprint(self) -> str | None:
        # Of a generator, what counts is what the loaders' positions hold.
        parts = {name: part for name, part in self.parts.items() if not isinstance(part, GeneratorState)}
        return module_state.fingerprint(self.trainer, {**parts, **self.further_parts()})

    def end_validation(self) -> None:
        """After a validation, which may be long, ask once more whether to stop."""
        self.ask_to_stop()
        self.leave_if_asked()

    def leave_if_asked(self) -> None:
        """Save and leave, if all ranks have agreed to.

        Raises:
            Stopped: they have.
        """
        if self.stopping:
            self._save_if_needed()
            self.run.leave(self.trainer.global_step, self._epoch())

    @property
    def _is_saved(self) -> bool:
        return bool(self.run.last_commit == self.trainer.global_step)

    def _save_if_needed(self) -> None:
        if not self._is_saved:
            self.trainer.save_checkpoint(self.run.directory / files.OWN_NAME.format(step=self.trainer.global_step))

    # ---- Saving

    def takes(self, path: Path, weights_only: bool | None) -> bool:
        """Return whether a save is one that this run can be resumed from."""
        return not weights_only and self.moment is not None and files.same(path.parent, self.run.directory)

    def save(self, path: Path, native: Callable[[], None]) -> None:
        """Save a checkpoint of the current step around the trainer's own save."""
        if self.engine is not None and self.moment != END:
            engine.require_no_window(self.engine)
        self.unwanted.discard(path.name)
        self.save_checkpoint(
            path.name,
            self.trainer.global_step,
            model=self.model,
            native=functools.partial(self._write, path, native),
            own=functools.partial(self._own, path),
            parts=self.further_parts(),
            owner=files.owner,
            entries=self._entries,
            facts=self._facts,
            best=model_checkpoints.best(self.trainer),
            is_file=not is_sharded(self.trainer.strategy),
        )

    def _write(self, path: Path, native: Callable[[], None]) -> None:
        with without_code(), contextlib.nullcontext() if self.engine is None else self.engine.data_only():
            native()
        plugin = self.trainer.strategy.checkpoint_io
        if isinstance(plugin, ResumeCheckpointIO) and plugin.error is not None:
            error, plugin.error = plugin.error, None
            raise error
        if not self._reported and path.is_file():
            files.require_loadable(path)

    def _own(self, path: Path) -> dict[str, Any]:
        state = self._before if self.moment == DUE and self._before is not None else self._state()
        step, callbacks = self.trainer.global_step, model_checkpoints.saving(self.trainer)
        return {
            **state,
            "checkpoints": {each.state_key: model_checkpoints.memory(each, path, step) for each in callbacks},
        }

    def _state(self) -> dict[str, Any]:
        trainer, loops = self.trainer, self.loops
        return {
            "moment": self.moment,
            "epoch": trainer.fit_loop.epoch_progress.current.processed,
            "loaders": self.loader_states(between=self.moment not in IN_EPOCH),
            "progress": loops.progress(),
            "metrics": logged_values.capture(loops),
            "row": logged_values.row_due(loops, self.moment),
            "gradients": gradients.capture(loops),
            "evaluation_workers": loops.evaluation_workers(),
            "engine": None if self.engine is None else self.engine.own(),
            "should_stop": trainer.should_stop,
        }

    def _facts(self) -> dict[str, Any]:
        fresh = self.moment in (VALIDATION, EPOCH)
        numbers = {name: float(value) for name, value in self.trainer.callback_metrics.items()} if fresh else {}
        return {
            "epoch": self._epoch(),
            # Metrics of an earlier step say nothing of these weights, and retention would rank them by it.
            "metrics": finite_metrics(numbers),
        }

    def _entries(self) -> list[PartEntry]:
        counted = {
            "counters": "progress of the loops, gradients of an unfinished accumulation",
            "metrics": "logged values that callbacks and schedulers read; ModelCheckpoint's memory",
        }
        found = [*files.entries(self.trainer), *self.entries(self.further_parts(), **counted)]
        for loader in self.loops.loaders:
            places = {"dataset": loader.dataset, "collate_fn": loader.collate_fn}
            found += self.missing_generators(places, "ResumeCallback")
        return found

    def _epoch(self) -> float:
        whole = self.trainer.fit_loop.epoch_progress.current.processed
        if self.moment not in IN_EPOCH:
            return float(whole)
        batches = self.trainer.num_training_batches
        return float(whole + self.trainer.fit_loop.epoch_loop.batch_progress.current.ready / batches)

    def remove(self, path: Path, native: Callable[[], None]) -> None:
        """Remove a checkpoint that Lightning does not want any more, once what follows it is committed.

        What a restart would take now stays, and so does the best.
        """
        if files.same(path.parent, self.run.directory) and (is_committed(path) or is_pending(path)):
            self.unwanted.add(path.name)
            self.run.prune_later(best=model_checkpoints.best(self.trainer))
        else:
            native()

    # ---- Ending

    def end_training(self, native: Callable[[], None]) -> None:
        """Save the last step where it is not saved, end as the trainer does, and remember that the run is finished."""
        self.moment = END
        self.reason = "finished"
        self._save_if_needed()
        native()
        self.run.flush()
        self.run.record("finished", step=self.trainer.global_step, epoch=self._epoch(), horizon=self.horizon())


def is_sharded(strategy: Any) -> bool:
    """Return whether a strategy saves a directory, into which every rank writes its share."""
    return (
        engine.is_used(strategy)
        or getattr(strategy, "_state_dict_type", "full") == "sharded"  # seam: lightning 2.4-2.6, as the line after
        or bool(getattr(strategy, "_save_distributed_checkpoint", False))
    )
