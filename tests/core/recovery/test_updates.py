"""An update begins where weights may change: after the closure, where an optimizer has one.

A schedule that moves between two updates can be taken back to what it was.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from resume_adapters.core.recovery.updates import UpdateWatch


@pytest.fixture
def watch() -> Iterator[UpdateWatch]:
    watch = UpdateWatch()
    watch.close()  # before it has begun there is nothing to close
    watch.begin()
    yield watch
    watch.close()


def test_a_step_is_an_update(watch: UpdateWatch) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    assert not watch.is_updating
    optimizer.step()
    assert watch.is_updating
    watch.end_step()
    assert not watch.is_updating
    watch.close()
    optimizer.step()
    assert not watch.is_updating


@pytest.mark.parametrize("give", [lambda step, run: step(run), lambda step, run: step(closure=run)])
def test_what_a_closure_does_comes_before_the_update(watch: UpdateWatch, give: Callable[..., Any]) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    seen = []

    def closure() -> float:
        seen.append(watch.is_updating)
        return 0.5

    assert give(optimizer.step, closure) == 0.5
    assert seen == [False]
    assert watch.is_updating
    watch.end_step()
    optimizer.step(None)
    assert watch.is_updating


class Hand(lr_scheduler.LRScheduler):
    """A schedule with a step of its own."""

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, epoch: int | None = None) -> None:
        self.last_epoch += 1
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.5


def sequential(optimizer: torch.optim.Optimizer) -> Any:
    parts = [lr_scheduler.ConstantLR(optimizer, 0.1, 1), lr_scheduler.StepLR(optimizer, 1, 0.5)]
    return lr_scheduler.SequentialLR(optimizer, parts, [1])


def chained(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.ChainedScheduler([lr_scheduler.StepLR(optimizer, 1, 0.5), Hand(optimizer)], optimizer)


SCHEDULES: list[Callable[[torch.optim.Optimizer], Any]] = [
    lambda optimizer: lr_scheduler.StepLR(optimizer, 1, 0.5),
    lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5),
    lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
    lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 1.0, 10),
    Hand,
    sequential,
    chained,
]


def step(schedule: Any) -> None:
    schedule.step(*([1.0] if isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else []))


@pytest.mark.parametrize("make", SCHEDULES)
@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)])
@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_schedule_that_moves_between_two_updates_is_taken_back(
    watch: UpdateWatch, make: Callable[[torch.optim.Optimizer], Any], rate: float | torch.Tensor
) -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=rate, capturable=False)
    schedule = make(optimizer)

    def now() -> list[Any]:
        groups = [{**group, "params": 0, "lr": float(group["lr"])} for group in optimizer.param_groups]
        return copy.deepcopy([schedule.state_dict(), groups])

    step(schedule)
    watch.end_step()
    held, live = now(), optimizer.param_groups[0]["lr"]
    step(schedule)
    step(schedule)
    assert not watch.is_updating and now() != held
    watch.restore_schedules()
    assert now() == held
    assert not isinstance(rate, torch.Tensor) or optimizer.param_groups[0]["lr"] is live
    step(schedule)
    watch.end_step()
    later = now()
    watch.restore_schedules()
    assert now() == later, "it was held at the later moment"


def test_a_schedule_costs_nothing_within_an_update(watch: UpdateWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    schedule = lr_scheduler.StepLR(optimizer, 1, 0.5)
    watch.end_step()
    optimizer.step()
    monkeypatch.delattr(lr_scheduler.LRScheduler, "state_dict")
    schedule.step()
    watch.end_step()
    with pytest.raises(AttributeError):
        schedule.step()


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, torch.cuda.amp.GradScaler])
@pytest.mark.filterwarnings("ignore:.*is deprecated", "ignore:.*CUDA is not available")
def test_a_scaler_that_has_seen_an_overflow_is_in_an_update(watch: UpdateWatch, kind: Any) -> None:
    """The optimizer is left out then."""
    optimizer = torch.optim.SGD([weight := torch.nn.Parameter(torch.ones(1))])
    scaler = kind(**({"device": "cpu"} if kind is torch.amp.GradScaler else {}))
    watch.end_step()
    if scaler.is_enabled():
        scaler.scale(weight.sum() * float("inf")).backward()
        scaler.step(optimizer)
        assert not watch.is_updating
    scaler.update()
    assert watch.is_updating


def test_classes_are_what_they_were_behind_a_block() -> None:
    def steps() -> list[Any]:
        kinds = [lr_scheduler.LRScheduler, lr_scheduler.SequentialLR, lr_scheduler.StepLR, Hand, torch.amp.GradScaler]
        return [vars(kind).get(name) for kind in kinds for name in ("step", "update")]

    before, watch = steps(), UpdateWatch()
    watch.begin()
    assert steps() != before
    watch.close()
    assert steps() == before
