"""Lightning's training loops: where they are when a checkpoint is saved, and how they go on from there.

A checkpoint is saved by a callback, so always in the middle of something: after a batch but before the validation that
is due, or after an epoch's hooks but before its end is counted. The loops' own way to restart guesses from counters
which of these it was, and skips what remained. Here the moment is saved, and what remained of it is done.

The loops are private. Everything of them that the adapter touches is in this module; ``tests/lightning/test_seams.py``
checks each of it against the installed version.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from resume_adapters.core.dataloader.instrument import are_kept
from resume_adapters.core.patching import replaced
from resume_adapters.lightning.compat import end_turn

Tree = dict[str, Any]

BATCH, DUE, VALIDATION, EPOCH, END = "batch", "due", "validation", "epoch", "end"
"""The moments at which a checkpoint is saved: after a batch, before a validation, after it, an epoch, the training."""

IN_EPOCH = (BATCH, DUE, VALIDATION)

_BATCHES = "epoch_loop.batch_progress"
"""The one counter that counts batches of the training; the others count steps, epochs, and batches of validations."""


class Loops:
    """The loops of one ``fit``.

    Args:
        trainer: the trainer.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.fit = trainer.fit_loop
        self.epoch = trainer.fit_loop.epoch_loop
        self.validation = trainer.fit_loop.epoch_loop.val_loop

    # ---- Saying where they are

    @property
    def is_accumulating(self) -> bool:
        """Whether the batch that ended left gradients that the next optimizer step will use."""
        return bool(self.trainer.lightning_module.automatic_optimization and self.epoch._should_accumulate())

    @property
    def loaders(self) -> list[Any]:
        """The training loaders."""
        return list(self.fit._combined_loader.flattened)

    @property
    def ahead(self) -> int:
        """Batches that were fetched and not yet used."""
        return len(getattr(self.fit._data_fetcher, "batches", ()))

    def progress(self) -> Tree:
        """Return every counter of the loops, by name."""
        counters = {name: counter.state_dict() for name, counter in _counters(self.fit, "")}
        return {"counters": counters, "batches_that_stepped": self.epoch._batches_that_stepped}

    def batches_done(self, saved: Tree) -> int:
        """Return the batches of the running epoch that :meth:`progress` says are done."""
        return int(saved["counters"][_BATCHES]["current"]["processed"])

    def in_batches(self, saved: Tree, size: Fraction, done: int | None) -> Tree:
        """Return what :meth:`progress` returned, counted in batches of another size.

        Args:
            saved: what it returned.
            size: batches of this launch for each of those.
            done: batches of this launch that are done of the epoch; ``None`` at its end.
        """
        counted = saved["counters"][_BATCHES]
        current, total = (counted[name]["processed"] for name in ("current", "total"))
        if done is None:
            length = self.trainer.num_training_batches
            done = length if length < math.inf else int(current * size)
        before = int((total - current) * size)
        moved = {  # of the batch that was saved in, not every count is up
            "current": {name: done - (current - count) for name, count in counted["current"].items()},
            "total": {name: before + done - (total - count) for name, count in counted["total"].items()},
        }
        return {**saved, "counters": {**saved["counters"], _BATCHES: {**counted, **moved}}}

    def evaluation_workers(self) -> list[bool]:
        """Return for each validation loader whether its workers outlive a validation and are running."""
        return [are_kept(each) for each in self._validation_loaders()]

    def validation_batches(self) -> int:
        """Return how many batches a validation has on this rank at least; 0 where that is not known before its end."""
        from torch.utils.data import IterableDataset

        loop, step = self.validation, inspect.signature(self.trainer.lightning_module.validation_step)
        loop.setup_data()
        loaders = self._validation_loaders()
        streams = (isinstance(getattr(each, "dataset", None), IterableDataset) for each in loaders)
        if not loaders or any(streams) or math.inf in loop.max_batches or "dataloader_iter" in step.parameters:
            return 0
        return sum(loop.max_batches) if loop._is_sequential else min(loop.max_batches)

    def _validation_loaders(self) -> list[Any]:
        combined = self.validation._combined_loader
        return list(combined.flattened) if combined is not None else []

    # ---- Going on

    def giving_loaders(self, watch: Callable[[list[Any]], None]) -> contextlib.AbstractContextManager[None]:
        """Return the context in which ``watch`` has the loaders whenever they are made, before a pass over them."""

        def load_states() -> None:
            self.fit._combined_loader_states_to_load = []
            watch(self.loaders)

        return replaced(self.fit, "_load_combined_loader_states", load_states)

    def run_from(self, moment: str, put_back: Callable[[], None], random_state: Callable[[], None]) -> None:
        """Run the training from a moment on, in place of the fit loop's ``run``.

        Args:
            moment: where the checkpoint was saved.
            put_back: puts back what the start of the loop resets.
            random_state: puts back the random state; called when nothing but the training draws from it any more.
        """
        loop = self.fit
        loop.setup_data()
        if loop.max_batches == 0 or self.trainer.limit_train_batches == 0:
            return
        loop.reset()
        loop.on_run_start()
        put_back()
        within_epoch = moment in IN_EPOCH
        if within_epoch:
            self._finish_batch(moment, random_state)
        else:
            random_state()
        while within_epoch or not loop.done:
            within_epoch = False
            try:
                loop.on_advance_start()
                loop.advance()
                loop.on_advance_end()
            except StopIteration:
                break
            finally:
                end_turn(loop)
        loop._restarting = False
        loop.on_run_end()

    def set_progress(self, saved: Tree, moment: str, row: Tree) -> None:
        """Put back the counters, and where in its epoch the fit loop is.

        What remained of the batch, or of the epoch, whose hooks had run is done: its row is logged, and schedulers
        that read a metric take their step.
        """
        for name, counter in _counters(self.fit, ""):
            counter.load_state_dict(saved["counters"][name])
        self.epoch._batches_that_stepped = saved["batches_that_stepped"]
        for loop in _loops(self.fit):
            end_turn(loop)
        self.fit._combined_loader_states_to_load = []
        if moment == EPOCH:
            self.epoch.update_lr_schedulers("epoch", update_plateau_schedulers=True)
            self.epoch._batches_that_stepped -= 1  # as Lightning does: the epoch's row is one of its last step
            self.trainer._logger_connector.log_metrics(row)
            self.epoch._batches_that_stepped += 1
            self.fit.epoch_progress.increment_completed()
        else:
            self.trainer._logger_connector.log_metrics(row)

    def start_evaluation_workers(self, running: list[bool]) -> None:
        """Start the lasting workers of validation loaders that were running."""
        for each, was_running in zip(self._validation_loaders(), running, strict=False):
            if was_running:
                iter(each)

    def _finish_batch(self, moment: str, random_state: Callable[[], None]) -> None:
        """Let the first turn of the loops do what remained of the epoch, and of the batch, that was saved in."""
        loop = self.epoch

        def on_advance_start() -> None:
            del self.fit.on_advance_start
            for loader in self.loaders:
                set_epoch(loader, self.fit.epoch_progress.current.processed)

        def reset() -> None:
            del loop.reset

        def advance(data_fetcher: Any) -> None:
            del loop.advance
            random_state()
            if moment == BATCH:
                loop.batch_progress.increment_completed()
            elif moment == VALIDATION:
                loop._should_check_val_fx = should_check_val

        def should_check_val(data_fetcher: Any) -> bool:
            del loop._should_check_val_fx
            return False

        loop._restarting = True  # the first turn is taken whatever the counters say, and no pass begins anew
        self.fit.on_advance_start, loop.reset, loop.advance = on_advance_start, reset, advance


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell a loader's samplers the epoch, as the fit loop does at the start of each."""
    samplers = {id(each): each for each in (loader.sampler, getattr(loader.batch_sampler, "sampler", None))}
    for sampler in samplers.values():
        if sampler is not None and callable(getattr(sampler, "set_epoch", None)):
            sampler.set_epoch(epoch)


def _loops(loop: Any) -> list[Any]:
    """Return a loop and those in it."""
    inner = [value for value in vars(loop).values() if hasattr(value, "_restarting")]
    return [loop, *(each for value in inner for each in _loops(value))]


def _counters(loop: Any, prefix: str) -> list[tuple[str, Any]]:
    """Return the counters of a loop and of those in it, by name."""
    found = []
    for name, value in vars(loop).items():
        if hasattr(value, "from_state_dict"):
            found.append((prefix + name, value))
        elif hasattr(value, "_restarting"):
            found += _counters(value, f"{prefix}{name}.")
    return found
