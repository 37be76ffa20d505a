"""Learning rate schedules on a different number of processes.

A prepared schedule steps once for each process at every optimizer step, and scripts make it that much longer. Its state
therefore counts in steps of the topology that saved it, and means another learning rate on any other one.
"""

from __future__ import annotations

import math
from typing import Any

from resume_adapters.core.session.rescale import restep
from resume_adapters.errors import StateMismatch

_TOLERANCE = 1e-3
"""Relative difference of learning rates that comes of counting, such as a last step that a schedule leaves out."""


def steps_each(scheduler: Any, ranks: int) -> int:
    """Return the steps that a prepared schedule takes at each optimizer step."""
    return ranks if _follows_ranks(scheduler) else 1


def _follows_ranks(scheduler: Any) -> bool:
    return bool(scheduler.step_with_optimizer and not scheduler.split_batches)


def replay(scheduler: Any, saved: dict[str, Any], before: int, now: int) -> None:
    """Step a fresh schedule to where a saved one was, and check that the learning rate is what it was.

    Args:
        scheduler: a prepared ``AcceleratedScheduler`` that has not stepped, whose optimizer is loaded.
        before: number of processes that saved it.
        now: number of processes here.

    Raises:
        StateMismatch: the schedule does not count steps, or was made for a different number of steps.
    """
    if not _follows_ranks(scheduler):
        scheduler.load_state_dict(saved)
        return
    inner = scheduler.scheduler
    steps, rest = divmod(saved["last_epoch"] * now, before)
    if rest or not hasattr(inner, "base_lrs"):
        raise StateMismatch(
            f"the {type(inner).__name__} was saved with number of ranks {before}, this launch has {now}, and it does "
            f"not count steps: launch with {before}"
        )
    restep(inner, inner.base_lrs, steps)
    rates = inner.get_last_lr()
    if not all(math.isclose(*pair, rel_tol=_TOLERANCE) for pair in zip(rates, saved["_last_lr"], strict=True)):
        raise StateMismatch(
            f"the schedule was saved with number of ranks {before}, this launch has {now}, and the learning rate would "
            f"be {rates} instead of {saved['_last_lr']}: launch with {before}, or make the schedule as long as the "
            "run's optimizer steps times the number of processes"
        )
