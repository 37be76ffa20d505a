"""A learning rate schedule goes on with another length, as if it had been made with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedules

from resume_adapters.core.dataloader.cursor import steps_done
from resume_adapters.core.session.rescale import Schedules, rates
from resume_adapters.errors import StateMismatch

KINDS: dict[str, Callable[[Any, int], Any]] = {
    "lambda": lambda optimizer, length: schedules.LambdaLR(optimizer, lambda step: 1 - step / length),
    "cosine": schedules.CosineAnnealingLR,
    "one cycle": lambda optimizer, length: schedules.OneCycleLR(optimizer, 0.5, total_steps=length),
    "warm-up and decay": lambda optimizer, length: schedules.SequentialLR(
        optimizer,
        [schedules.LinearLR(optimizer, total_iters=length // 4), schedules.CosineAnnealingLR(optimizer, length)],
        [length // 4],
    ),
}


def made(kind: str, length: int, steps: int) -> Any:
    """Return a schedule that has stepped."""
    schedule = KINDS[kind](torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1), length)
    for _ in range(steps):
        schedule.optimizer.step()
        schedule.step()
    return schedule


@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_as_if_it_had_been_made_with_its_new_length(kind: str) -> None:
    known, live, expected = Schedules(), made(kind, 20, 0), made(kind, 20, 6)
    known.remember(live)
    live.load_state_dict(made(kind, 40, 12).state_dict())
    known.move(6)
    for _ in range(13):
        assert rates(live) == rates(expected)
        for each in (live, expected):
            each.optimizer.step()
            each.step()
    assert live.state_dict()["last_epoch"] == 19


def test_one_that_goes_by_a_metric_is_left_alone_and_another_kind_is_refused() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    known = Schedules()
    known.remember(schedules.ReduceLROnPlateau(optimizer))
    known.move(3)

    class Odd:
        def __init__(self) -> None:
            self.optimizer = optimizer

        def step(self) -> None: ...

        def state_dict(self) -> dict[str, Any]:
            return {}

    known.remember(Odd())
    with pytest.raises(StateMismatch, match="the Odd does not count steps"):
        known.move(3)


class AtAnyStep:
    """A schedule that counts from -1 and can be at any step at once, as those of DeepSpeed."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.last_batch_iteration = -1

    def step(self, last_batch_iteration: int | None = None) -> None:
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self.optimizer.param_groups[0]["lr"] = 1.0 / (2 + self.last_batch_iteration)

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}


class Wrapped:
    """What a framework makes of a schedule."""

    def __init__(self, schedule: Any) -> None:
        self.scheduler = schedule

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> None: ...


@pytest.mark.parametrize("each", [1, 2])
def test_one_that_is_wrapped_and_can_be_at_any_step_is_brought_there_once(each: int) -> None:
    schedule, expected = (AtAnyStep(made("lambda", 20, 0).optimizer) for _ in range(2))
    known = Schedules()
    known.remember(Wrapped(Wrapped(schedule)), each)
    known.remember(Wrapped(None))
    for _ in range(17):
        schedule.step()
    known.remember(schedule, each)  # where it begins is known
    known.move(6)
    for _ in range(6 * each):
        expected.step()
    assert schedule.state_dict() == expected.state_dict() and rates(schedule) == rates(expected)


@pytest.mark.parametrize(
    ("consumed", "carried", "steps"), [(4, False, 10), (5, False, 10), (7, False, 12), (5, True, 9), (6, True, 10)]
)
def test_the_last_step_of_an_epoch_has_fewer_batches_unless_they_are_carried(
    consumed: int, carried: bool, steps: int
) -> None:
    """Two epochs of seven batches, two to a step, and some of the third."""
    assert steps_done(2, consumed, 7, 2, carried=carried) == steps
