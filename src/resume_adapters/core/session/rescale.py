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
from resume_adapters.core.log import logger
from resume_adapters.errors import StateMismatch, UnsupportedSetting

KEEP_SAMPLES = "keep-samples"
"""What ``on_batch_change`` is called where a run goes on by samples."""

GIVEN_IN_STEPS = "max_steps= counts steps, which have another number of samples now. Give the run's length in epochs"

SEVERAL_LOADERS = "of several training loaders each would have to be divided alike"
"""Why a run's length cannot be computed; see :attr:`BatchChange.no_horizon`."""


class BatchChange:
    """Knows how many samples an optimizer step has, and what follows where that was another number.

    Args:
        on_batch_change: ``"keep-samples"`` goes on where an optimizer step has another number of samples; ``"refuse"``
            does not.
        accumulation: batches of the training loop in an optimizer step.

    Attributes:
        accumulation: batches of the training loop in an optimizer step.
        keeps_samples: the run goes on by samples.
        no_horizon: why the run's length cannot be computed anew.
        carries_windows: an accumulation goes on from one pass over the data into the next.
        begun: batches of the first step's accumulation that were consumed in steps of another size.
        shift: optimizer steps that the run has taken beyond those that would have brought it here in this launch.
        steps: the latter, where the schedules are to be brought there; else ``None``.
    """

    def __init__(self, on_batch_change: str, accumulation: int) -> None:
        if on_batch_change not in ("refuse", KEEP_SAMPLES):
            raise UnsupportedSetting(f'on_batch_change={on_batch_change!r} is neither "refuse" nor "{KEEP_SAMPLES}"')
        self.keeps_samples = on_batch_change == KEEP_SAMPLES
        self.no_horizon = ""
        self.carries_windows = False
        self.begun = self.shift = 0
        self.steps: int | None = None
        self.accumulation = accumulation

    def samples(self, together: int) -> int:
        """Return the samples in an optimizer step.

        Args:
            together: samples in a batch of the training loop, on all ranks together.
        """
        return together * self.accumulation

    def obstacle(self, before: int, now: int, left: int | None, length: int | None) -> str:
        """Return why the run cannot go on by samples; empty where it can.

        Args:
            before: samples in an optimizer step when the run was saved.
            now: samples in one now.
            left: batches of the training loop that are left of the pass; ``None`` where that is not known.
            length: batches of it in a pass, likewise.
        """
        if not self.keeps_samples:
            return (
                f"an optimizer step had {before} samples and would now have {now}, and the learning rate and the "
                "number of steps would silently be others. Change the batch size or the accumulation so that it has "
                f'{before}, or go on by samples, with a schedule of another length: on_batch_change="{KEEP_SAMPLES}"'
            )
        if left is None or length is None or self.no_horizon:
            reason = self.no_horizon or "how many samples a pass over the data has is not known"
            return f"the schedule's length cannot be computed anew: {reason}"
        return ""

    def go_on(self, step: int, epoch: int, consumed: int, length: int) -> int:
        """Go on by samples; return the steps of this size that would have brought the run where it is.

        Args:
            step: optimizer steps completed.
            epoch: the epoch, from 0, of the pass that was under way or had ended.
            consumed: batches of the training loop, of the size that they have now, that are done of it.
            length: batches of the training loop in a pass.
        """
        self.begun = consumed % self.accumulation
        self.steps = steps_done(epoch, consumed, length, self.accumulation, carried=self.carries_windows)
        self.shift = step - self.steps
        return self.steps

    def stay(self, step: int) -> None:
        """Go on with steps of the size that the last ones had.

        Args:
            step: optimizer steps completed.
        """
        if self.keeps_samples:
            self.steps = step - self.shift


class Schedules:
    """The schedules of a run, noted before anything is loaded into them."""

    def __init__(self) -> None:
        self._fresh: list[tuple[Any, Any, Fraction]] = []

    def note(self, schedule: Any, each: int | Fraction = 1) -> None:
        """Note a schedule that has not stepped; one that steps by a metric has no length, and is left alone.

        Args:
            schedule: of torch or of DeepSpeed, or what a framework wraps around one.
            each: steps that it takes at each optimizer step.
        """
        while hasattr(schedule, "scheduler"):
            schedule = schedule.scheduler
        if schedule is None or "metrics" in inspect.signature(schedule.step).parameters:
            return
        if not any(known is schedule for known, _, _ in self._fresh):
            self._fresh.append((schedule, copy.deepcopy(schedule.state_dict()), Fraction(each)))

    def move(self, steps: int) -> None:
        """Bring each schedule to where it is after some optimizer steps of this launch, and say the learning rates.

        Raises:
            StateMismatch: a schedule does not go by counting steps.
        """
        for schedule, fresh, each in self._fresh:
            before = rates(schedule)
            if "last_batch_iteration" in fresh:  # one of DeepSpeed's, which can be at any step at once
                schedule.step(fresh["last_batch_iteration"] + int(steps * each))
            elif "_last_lr" in fresh:
                schedule.load_state_dict(fresh)
                restep(schedule, fresh["_last_lr"], int(steps * each))
            else:
                raise StateMismatch(
                    f"the {type(schedule).__name__} does not go by counting steps, so its length cannot be computed "
                    "anew: launch with as many samples in an optimizer step as before"
                )
            name = type(schedule).__name__
            logger.info(
                "%s: step %d of its new length; learning rate %s, was %s.",
                name,
                int(steps * each),
                rates(schedule),
                before,
            )


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
