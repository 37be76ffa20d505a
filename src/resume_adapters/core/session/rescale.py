"""Resuming with a different global batch size.

The steps that the run has taken are counted on. Its length, and the position of its schedules, are those of a run that
has always taken steps of this size, and has come to the same sample of the same epoch.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from fractions import Fraction
from typing import Any

from resume_adapters.core.dataloader.cursor import steps_done
from resume_adapters.core.state.stateful import innermost
from resume_adapters.errors import StateMismatch, UnsupportedSetting

KEEP_SAMPLES = "keep-samples"
"""The value of ``on_batch_change`` with which a run resumes by samples."""

GIVEN_IN_STEPS = (
    "max_steps= counts steps, which have a different number of samples now. Give the run's length in epochs"
)
SEVERAL_LOADERS = "of several training loaders each would have to be divided alike"


class Rescale:
    """Knows how many samples an optimizer step has, and what follows if that number was different.

    Args:
        on_batch_change: ``"keep-samples"`` resumes where an optimizer step has a different number of samples;
            ``"refuse"`` does not.
        accumulation: batches of the training loop in an optimizer step.
        accumulates_across_epochs: an accumulation goes on from one pass over the data into the next.
        no_horizon: why the run's length cannot be computed for a different batch size; empty where it can.

    Attributes:
        keeps_samples: the run resumes by samples.
        accumulation: batches of the training loop in an optimizer step.
        shift: optimizer steps that the run has taken beyond those that this launch's batch size would have needed.
        schedules: the learning rate schedules, as they were before anything was loaded into them.
    """

    def __init__(
        self,
        on_batch_change: str,
        accumulation: int,
        *,
        accumulates_across_epochs: bool = False,
        no_horizon: str = "",
    ) -> None:
        if on_batch_change not in ("refuse", KEEP_SAMPLES):
            raise UnsupportedSetting(f'on_batch_change must be "refuse" or "{KEEP_SAMPLES}", got {on_batch_change!r}')
        self.keeps_samples = on_batch_change == KEEP_SAMPLES
        self.accumulation = accumulation
        self.shift = 0
        self.schedules = Schedules()
        self._across_epochs = accumulates_across_epochs
        self._no_horizon = no_horizon
        self._begun = 0
        self._steps: int | None = None

    def forbid(self, reason: str) -> None:
        """Remember why the run's length cannot be computed for a different batch size."""
        self._no_horizon = reason

    def restore(self, shift: int) -> None:
        """Restore the shift that a checkpoint holds."""
        self.shift = shift

    def samples(self, global_batch: int) -> int:
        """Return the samples in an optimizer step.

        Args:
            global_batch: samples in a batch of the training loop, on all ranks together.
        """
        return global_batch * self.accumulation

    def obstacle(self, before: int, now: int, done: int | None, ranks: int) -> str:
        """Return why the run cannot resume by samples; empty where it can.

        Args:
            before: samples in an optimizer step when the run was saved.
            now: samples in one now.
            done: batches of the training loop that are done in the pass; ``None`` where that is not known.
            ranks: the number of ranks now.
        """
        if not self.keeps_samples:
            each, rest = divmod(before, ranks)
            values = "which it cannot have" if rest else f"where batch size times accumulation is {each}"
            return (
                f"an optimizer step had {before} samples and would now have {now}, and the learning rate and the "
                "number of steps would silently be different. Change the batch size or the accumulation so that it has "
                f"{before}: on {ranks} processes, {values}. Or resume by samples, with a schedule of another length: "
                f'on_batch_change="{KEEP_SAMPLES}"'
            )
        if done is None or self._no_horizon:
            reason = self._no_horizon or "how many samples a pass over the data has is not known"
            return f"the schedule's new length cannot be computed: {reason}"
        return ""

    def resume_by_samples(self, step: int, epoch: int, consumed: int, length: int) -> int:
        """Convert the steps of the run to steps of this size, and count from there.

        Args:
            epoch: the epoch, from 0, of the pass that was under way or had ended.
            consumed: batches of the training loop, of the size that they have now, that are done in it.
            length: batches of the training loop in a pass.
        """
        self._begun = consumed % self.accumulation
        self._steps = steps_done(epoch, consumed, length, self.accumulation, carried=self._across_epochs)
        self.shift = step - self._steps
        return self._steps

    def resume_by_steps(self, step: int) -> None:
        """Resume with steps of the size that the last ones had."""
        if self.keeps_samples:
            self._steps = step - self.shift

    def take_begun(self) -> int:
        """Return, once, the batches of the first step's accumulation that were consumed in steps of another size."""
        begun, self._begun = self._begun, 0
        return begun

    def move_schedules(self) -> list[str]:
        """Move the schedules to where the run is by samples, if it resumes by samples; return in words what was done.

        Call it when schedules and loaders are restored.

        Raises:
            StateMismatch: a schedule does not count steps.
        """
        return [] if self._steps is None else self.schedules.move(self._steps)


class Schedules:
    """The learning rate schedules of a run, as they were before anything was loaded into them.

    A schedule counts its own steps, and was made for the length that the run has in this launch. Where the run resumes
    by samples, its schedules are stepped again, from their beginning to the step that stands for as many samples.
    """

    def __init__(self) -> None:
        self._fresh: list[tuple[Any, Any, Fraction]] = []

    def remember(self, schedule: Any, each: int | Fraction = 1) -> None:
        """Remember a schedule that has not stepped; one that steps by a metric has no length, and is left alone.

        Args:
            schedule: of torch or of DeepSpeed, or what a framework wraps around one.
            each: steps that it takes at each optimizer step.
        """
        schedule = innermost(schedule, "scheduler")
        if schedule is None or "metrics" in inspect.signature(schedule.step).parameters:
            return
        if not any(known is schedule for known, _, _ in self._fresh):
            self._fresh.append((schedule, copy.deepcopy(schedule.state_dict()), Fraction(each)))

    def move(self, steps: int) -> list[str]:
        """Move each schedule to where it is after some optimizer steps of this launch; return the learning rates.

        Raises:
            StateMismatch: a schedule does not count steps.
        """
        moved = []
        for schedule, fresh, each in self._fresh:
            before = rates(schedule)
            if "last_batch_iteration" in fresh:  # one of DeepSpeed's, which can be at any step at once
                schedule.step(fresh["last_batch_iteration"] + int(steps * each))
            elif "_last_lr" in fresh:
                schedule.load_state_dict(fresh)
                restep(schedule, fresh["_last_lr"], int(steps * each))
            else:
                raise StateMismatch(
                    f"the {type(schedule).__name__} does not count steps, so its length cannot be computed again: "
                    "launch with as many samples in an optimizer step as before"
                )
            moved.append(
                f"{type(schedule).__name__}: step {int(steps * each)} of its new length; learning rate "
                f"{rates(schedule)}, was {before}."
            )
        return moved


def rates(schedule: Any) -> list[float]:
    """Return the learning rates that a schedule's optimizer has."""
    return [float(group["lr"]) for group in schedule.optimizer.param_groups]


def restep(schedule: Any, initial: list[float], steps: int) -> None:
    """Step a fresh schedule of torch, whatever rates its optimizer was given since.

    Args:
        schedule: the schedule, in the state in which it was made.
        initial: the learning rates at its beginning.
        steps: how often to step it.
    """
    for group, rate in zip(schedule.optimizer.param_groups, initial, strict=True):
        group["lr"] = rate
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")  # the optimizer's steps were before
        for _ in range(steps):
            schedule.step()
