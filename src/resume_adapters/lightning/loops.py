"""Lightning's training loops: where they are when a checkpoint is saved, and how they continue from there.

A callback saves a checkpoint, so always in the middle of something: after a batch but before the validation that is
due, or after an epoch's hooks but before its end is counted. The loops' own restart guesses from counters which of
these it was, and skips the rest. Here the save point is saved, and the rest is done.

The loops are private. Everything of them that the adapter touches is in this module; ``tests/lightning/test_seams.py``
checks each of it against the installed version.
"""

from __future__ import annotations

import contextlib
import enum
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Annotated, Any

from resume_adapters.core.patching import replaced, wrapped
from resume_adapters.core.state.records import FRESH, Record
from resume_adapters.lightning.compat import MaxSizeCycle, pl


class SavePoint(str, enum.Enum):
    """Where in the training a checkpoint is saved; the values are those on disk.

    Attributes:
        BATCH: after a batch.
        DUE: before a validation that is due.
        VALIDATION: after a validation.
        EPOCH: after the hooks of an epoch's end.
        END: after the last epoch.
    """

    BATCH = "batch"
    DUE = "due"
    VALIDATION = "validation"
    EPOCH = "epoch"
    END = "end"

    @property
    def in_epoch(self) -> bool:
        """Whether an epoch is running."""
        return self in (SavePoint.BATCH, SavePoint.DUE, SavePoint.VALIDATION)


@dataclass
class LoopProgress(Record):
    """How far the loops are.

    Attributes:
        counters: the state of each counter, by the path of its attribute.
        batches_that_stepped: batches that an optimizer step followed.
    """

    counters: Annotated[dict[str, Any], FRESH]
    batches_that_stepped: int


_BATCHES = "epoch_loop.batch_progress"
"""The one counter that counts batches of the training; the others count steps, epochs, and batches of validations."""


class Loops:
    """The loops of one ``fit``."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.fit = trainer.fit_loop
        self.epoch = trainer.fit_loop.epoch_loop
        self.validation = trainer.fit_loop.epoch_loop.val_loop

    # ---- Where they are

    @property
    def is_accumulating(self) -> bool:
        """Whether the batch that ended left gradients that the next optimizer step will use."""
        if self.trainer.accumulate_grad_batches == 1:  # asked first, since the loop asks a dozen objects
            return False
        return bool(self.trainer.lightning_module.automatic_optimization and self.epoch._should_accumulate())

    @property
    def loaders(self) -> list[Any]:
        """The training loaders."""
        return list(self.fit._combined_loader.flattened)

    @property
    def fetched_ahead(self) -> int:
        """Batches that were fetched and not yet used."""
        return len(getattr(self.fit._data_fetcher, "batches", ()))

    @property
    def epochs_done(self) -> int:
        """Epochs whose hooks have run."""
        return int(self.fit.epoch_progress.current.processed)

    @property
    def epochs_reached(self) -> float:
        """The epochs that are done, with the fraction of the running one whose batches were begun."""
        begun: int = self.epoch.batch_progress.current.ready
        done: int = self.fit.epoch_progress.current.processed
        return done + begun / float(self.trainer.num_training_batches)

    @property
    def is_last_batch(self) -> bool:
        """Whether the batch that ended is the last of its epoch."""
        return bool(self.epoch.batch_progress.is_last_batch)

    @property
    def place(self) -> tuple[int, ...]:
        """Where the training is: the batches that were begun, and how often each part of an epoch was reached."""
        epochs = self.fit.epoch_progress.current
        return (
            self.epoch.batch_progress.total.ready,
            *(epochs.ready, epochs.started, epochs.processed, epochs.completed),
        )

    def logged_names(self) -> list[str]:
        """Return the names under which the running epoch has logged, or will at its end."""
        names = {each.meta.name for each in self.epoch._results.values()}
        return sorted({*names, *(f"{name}{suffix}" for name in names for suffix in ("_step", "_epoch"))})

    @property
    def is_out_of_time(self) -> bool:
        """Whether a Timer has ended the training, as ``max_time`` does; with more time it goes on."""
        timers = [each for each in self.trainer.callbacks if isinstance(each, pl.callbacks.Timer)]
        remaining = [each.time_remaining() for each in timers]
        return any(each is not None and each <= 0 for each in remaining)

    def why_over(self) -> str:
        """Return which of the trainer's limits has ended the training."""
        epochs, steps = self.limits
        if steps is not None and 0 <= steps <= self.trainer.global_step:
            return f"max_steps={steps}"
        if epochs is not None and 0 <= epochs <= self.epochs_done:
            return f"max_epochs={epochs}"
        if self.is_out_of_time:
            return "max_time is over, or the duration of a Timer"
        return "trainer.should_stop was set, as EarlyStopping does"

    @property
    def limits(self) -> list[int | None]:
        """The epochs and the steps after which the training is over, as callbacks have set them by now."""
        return [self.fit.max_epochs, self.epoch.max_steps]

    def progress(self) -> LoopProgress:
        """Capture every counter of the loops."""
        counters = {path: _counts(each) for path, each in _counters(self.fit, "")}
        return LoopProgress(counters, self.epoch._batches_that_stepped)

    def batches_done(self, saved: LoopProgress) -> int:
        """Return the batches of the running epoch that were done when the counters were captured."""
        return int(saved.counters[_BATCHES]["current"]["processed"])

    def in_batches(self, saved: LoopProgress, size: Fraction, done: int | None) -> LoopProgress:
        """Return captured counters in batches of a different size.

        Args:
            saved: what :meth:`progress` returned.
            size: batches of this launch for each of those.
            done: batches of this launch that are done in the epoch; ``None`` at its end.
        """
        counted = saved.counters[_BATCHES]
        current, total = (counted[name]["processed"] for name in ("current", "total"))
        if done is None:
            length = self.trainer.num_training_batches
            done = length if length < math.inf else int(current * size)
        before = int((total - current) * size)
        rescaled = {  # not every count includes the batch after which was saved
            "current": {name: done - (current - count) for name, count in counted["current"].items()},
            "total": {name: before + done - (total - count) for name, count in counted["total"].items()},
        }
        return replace(saved, counters={**saved.counters, _BATCHES: {**counted, **rescaled}})

    def validated(self) -> list[int]:
        """Return the batches that were validated on each validation loader; loggers have them as steps."""
        seen = self.validation._seen_batches_per_dataloader
        return [seen[index] for index in range(len(self.validation_loaders()))]

    def restore_validated(self, saved: list[int]) -> None:
        """Restore what :meth:`validated` returned; the loaders are made for that, which would count from 0."""
        if any(saved):
            self.make_validation_loaders()
            self.validation._seen_batches_per_dataloader.update(enumerate(saved))

    def make_validation_loaders(self) -> None:
        """Make the validation loaders, unless they are made."""
        self.trainer.validating = True
        self.validation.setup_data()
        self.trainer.training = True

    def validation_batches(self) -> int:
        """Return how many batches a validation has on this rank at least; 0 where that is not known before its end."""
        from torch.utils.data import IterableDataset

        loop, step = self.validation, inspect.signature(self.trainer.lightning_module.validation_step)
        loop.setup_data()
        loaders = self.validation_loaders()
        streams = (isinstance(getattr(each, "dataset", None), IterableDataset) for each in loaders)
        if not loaders or any(streams) or math.inf in loop.max_batches or "dataloader_iter" in step.parameters:
            return 0
        return sum(loop.max_batches) if loop._is_sequential else min(loop.max_batches)

    def validation_loaders(self) -> list[Any]:
        """Return the validation loaders; none before they are made."""
        combined = self.validation._combined_loader
        return list(combined.flattened) if combined is not None else []

    # ---- Resuming

    def passing_loaders_to(self, track: Callable[[list[Any]], None]) -> contextlib.AbstractContextManager[None]:
        """Return the context in which ``track`` gets the loaders whenever they are made, before a pass over them."""

        def load_states() -> None:
            self.fit._combined_loader_states_to_load = []
            track(self.loaders)

        return replaced(self.fit, "_load_combined_loader_states", load_states)

    @property
    def have_loaders(self) -> bool:
        """Whether the training loaders are made, and the first pass over them has begun."""
        return self.fit._combined_loader is not None

    def forget_loaders(self) -> None:
        """Drop the training loaders, so that the fit loop makes them once more and begins the pass again."""
        self.fit._combined_loader = None

    def run_from(self, point: SavePoint, restore: Callable[[], None], restore_random_state: Callable[[], None]) -> None:
        """Run the training from a save point on, in place of the fit loop's ``run``.

        Args:
            restore: restores what the start of the loop resets.
            restore_random_state: restores the random state; called when only the training still draws from it.
        """
        loop = self.fit
        loop.setup_data()
        if loop.max_batches == 0 or self.trainer.limit_train_batches == 0:
            return
        loop.reset()
        loop.on_run_start()
        restore()
        goes_on = True
        if point.in_epoch:
            with self._finishing_batch(point, restore_random_state):
                goes_on = self._take_turn()
        else:
            restore_random_state()
        while goes_on and not loop.done:
            goes_on = self._take_turn()
        loop._restarting = False
        loop.on_run_end()

    def _take_turn(self) -> bool:
        """Run an epoch of the fit loop; return whether it goes on."""
        try:
            self.fit.on_advance_start()
            self.fit.advance()
            self.fit.on_advance_end()
        except StopIteration:
            return False
        finally:
            _end_turn(self.fit)
        return True

    def restore_progress(self, saved: LoopProgress, point: SavePoint, row: dict[str, Any]) -> None:
        """Restore the counters, and do what was left of the batch or of the epoch whose hooks had run.

        Its row is logged, and schedulers that read a metric step.

        Args:
            saved: what :meth:`progress` returned.
            row: what the loggers were still to get.
        """
        for path, counter in _counters(self.fit, ""):
            counter.load_state_dict(saved.counters[path])
        self.epoch._batches_that_stepped = saved.batches_that_stepped
        for loop in _loops(self.fit):
            _end_turn(loop)
        self.fit._combined_loader_states_to_load = []
        if point is SavePoint.EPOCH:
            self.epoch.update_lr_schedulers("epoch", update_plateau_schedulers=True)
            self.epoch._batches_that_stepped -= 1  # as Lightning does: the epoch's row is one of its last step
            self.trainer._logger_connector.log_metrics(row)
            self.epoch._batches_that_stepped += 1
            self.fit.epoch_progress.increment_completed()
        else:
            self.trainer._logger_connector.log_metrics(row)

    def set_accumulation(self) -> None:
        """Set the accumulation of the running epoch, where a callback sets it at the start of each."""
        for each in self.trainer.callbacks:
            if isinstance(each, pl.callbacks.GradientAccumulationScheduler):
                each.on_train_epoch_start(self.trainer)

    def restore_cycles(self, has_restarted: list[bool]) -> None:
        """Restore which of several loaders were at an end before, in the mode in which the longest ends the epoch."""
        iterator = self.fit._combined_loader._iterator
        if isinstance(iterator, MaxSizeCycle):
            iterator._consumed = [
                here or before for here, before in zip(iterator._consumed, has_restarted, strict=True)
            ]

    @contextlib.contextmanager
    def _finishing_batch(self, point: SavePoint, restore_random_state: Callable[[], None]) -> Iterator[None]:
        """Begin the first turn of the loops with what was left of the batch after which was saved."""
        loop, skips_validation = self.epoch, False

        def on_advance_start() -> None:
            for loader in self.loaders:
                set_epoch(loader, self.epochs_done)

        def advance(data_fetcher: Any) -> None:
            nonlocal skips_validation
            restore_random_state()
            if point is SavePoint.BATCH:
                loop.batch_progress.increment_completed()
            skips_validation = point is SavePoint.VALIDATION

        def should_check_val(native: Callable[..., bool], data_fetcher: Any) -> bool:
            nonlocal skips_validation
            is_skipped, skips_validation = skips_validation, False
            return not is_skipped and native(data_fetcher)

        loop._restarting = True  # the first turn is taken whatever the counters say, and begins no new pass
        self.validation._has_run = False  # it may have, in what a finder trained, and then the turn would be left out
        with (
            wrapped(self.fit, "on_advance_start", _first_call(on_advance_start)),
            wrapped(loop, "reset", _first_call(lambda: None)),
            wrapped(loop, "advance", _first_call(advance)),
            wrapped(loop, "_should_check_val_fx", should_check_val),
        ):
            yield


def _end_turn(loop: Any) -> None:
    """Clear a loop's marks of a restart, as Lightning does after the first turn."""
    if hasattr(loop, "on_iteration_done"):
        loop.on_iteration_done()  # seam: lightning 2.5-2.6
    else:
        loop._restarting = False  # seam: lightning 2.4, which has no other mark


def _first_call(instead: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper of a method that replaces its first call."""
    pending = [instead]
    return lambda native, *args: pending.pop()(*args) if pending else native(*args)


def set_epoch(loader: Any, epoch: int) -> None:
    """Set the epoch of a loader's samplers, as the fit loop does at the start of each."""
    samplers = {id(each): each for each in (loader.sampler, getattr(loader.batch_sampler, "sampler", None))}
    for sampler in samplers.values():
        if sampler is not None and callable(getattr(sampler, "set_epoch", None)):
            sampler.set_epoch(epoch)


def _loops(loop: Any) -> list[Any]:
    """Return a loop and those in it."""
    inner = [value for value in vars(loop).values() if hasattr(value, "_restarting")]
    return [loop, *(each for value in inner for each in _loops(value))]


def _counters(loop: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the counters of a loop and of the loops in it, each after its path."""
    for name, value in vars(loop).items():
        if _is_counter(value):
            yield prefix + name, value
        elif hasattr(value, "_restarting"):
            yield from _counters(value, f"{prefix}{name}.")


def _is_counter(value: Any) -> bool:
    return hasattr(value, "from_state_dict")


def _counts(counter: Any) -> dict[str, Any]:
    """Return what the ``state_dict()`` of a counter does, which copies in depth: it would take seven times as long."""
    return {
        name: each if type(each) in _PLAIN or not _is_counter(each) else _counts(each)
        for name, each in vars(counter).items()
    }


_PLAIN = frozenset((bool, int))
