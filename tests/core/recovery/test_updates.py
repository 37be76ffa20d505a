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
from resume_adapters.errors import NotRestored


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


def lose(*_: Any) -> None:
    raise RuntimeError("lost")


def change(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for each in optimizer.param_groups[0]["params"]:
        each.detach().add_(1)


def test_a_hook_that_fails_before_a_step_is_no_update(watch: UpdateWatch) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    failing = optimizer.register_step_pre_hook(lose)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="lost"):
            optimizer.step()
        assert not watch.is_updating
    failing.remove()
    changing = optimizer.register_step_pre_hook(change)
    failing = optimizer.register_step_pre_hook(lose)
    with pytest.raises(RuntimeError, match="lost"):
        optimizer.step()
    assert watch.is_updating, "a hook has changed the weights"
    watch.end_step()
    failing.remove()
    optimizer.step()
    assert watch.is_updating
    changing.remove()
    watch.close()
    assert not optimizer._optimizer_step_pre_hooks


class Ranks:
    """One of two ranks, which gets what the other has sent."""

    sent: Any = None

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def broadcast(self, value: Any, root: int) -> Any:
        if self.rank == root:
            Ranks.sent = copy.deepcopy(value)
        return Ranks.sent


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_rank_takes_weights_optimizer_schedule_and_scaler_of_another(watch: UpdateWatch) -> None:
    def rank(steps: int) -> tuple[Any, ...]:
        watch = UpdateWatch()
        watch.begin()
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        schedule, scaler = lr_scheduler.StepLR(optimizer, 1, 0.5), torch.amp.GradScaler("cpu", growth_interval=1)
        for _ in range(steps):
            scaler.scale(model(torch.ones(3)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
        watch.close()
        return watch, model, optimizer, schedule, scaler

    def now(of: tuple[Any, ...]) -> Any:
        return copy.deepcopy([each.state_dict() for each in of[1:]])

    one, other, first = rank(1), rank(2), rank(0)
    before = now(one)
    for number, (each_watch, model, *_) in enumerate((one, other)):
        each_watch.take_from(0, Ranks(number), [model])
    torch.testing.assert_close(now(one), before, rtol=0, atol=0)
    torch.testing.assert_close(now(other), before, rtol=0, atol=0)
    with pytest.raises(ValueError, match="argument 2 is longer"):
        first[0].take_from(0, Ranks(1), [first[1]])
    other[1].bfloat16()
    Ranks.sent[0] = copy.deepcopy(other[1].state_dict())
    other[0].take_from(0, Ranks(1), [other[1]])
    torch.testing.assert_close(other[2].state_dict(), before[1], rtol=0, atol=0)
    Ranks.sent[3]["dropped"] = 1
    with pytest.raises(NotRestored, match=r"GradScaler.*dropped: not restored"):
        other[0].take_from(0, Ranks(1), [other[1]])


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
    moved = watch.begin_holding()
    watch.end_step()
    later = now()
    watch.restore_schedules()
    assert now() == later, "it was held at the later moment"
    step(schedule)
    watch.restore_schedules(moved)
    assert now() == held, "all ranks go back to the earlier one"


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
