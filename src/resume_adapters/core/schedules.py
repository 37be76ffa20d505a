"""Learning rate schedules at another number of steps, where an optimizer step has another number of samples now.

A schedule counts its own steps, and was made for the length that the run has in this launch. Where the run goes on by
samples, its schedules are stepped anew, from their beginning to the step that stands for as many samples.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from fractions import Fraction
from typing import Any

from resume_adapters.core import report
from resume_adapters.errors import StateMismatch


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
                step_anew(schedule, fresh["_last_lr"], int(steps * each))
            else:
                raise StateMismatch(
                    f"the {type(schedule).__name__} does not go by counting steps, so its length cannot be computed "
                    "anew: launch with as many samples in an optimizer step as before"
                )
            name = type(schedule).__name__
            report.logger.info(
                "%s: step %d of its new length; learning rate %s, was %s.",
                name,
                int(steps * each),
                rates(schedule),
                before,
            )


def rates(schedule: Any) -> list[float]:
    """Return the learning rates that a schedule's optimizer has."""
    return [float(group["lr"]) for group in schedule.optimizer.param_groups]


def step_anew(schedule: Any, initial: list[float], steps: int) -> None:
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
