"""Whoever is about to change what is being copied waits, and nobody else does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from resume_adapters.core.staging.fence import Fence
from waiting import LIMIT, until_ended


class Copied(threading.Event):
    """Knows whether somebody waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_awaited = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.is_awaited.set()
        return super().wait(timeout)


class Ledger:
    """What a fence did, in order."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.fence = Fence(lambda seconds: self.said.append("waited"))
        self.copied = Copied()

    def arm(self, copied: Copied | None = None) -> None:
        self.copied = copied or Copied()
        self.fence.arm(self.copied, lambda: self.said.append("passed"))


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    native = (torch.nn.Module.load_state_dict, torch.optim.Optimizer.load_state_dict)
    made = Ledger()
    yield made
    made.fence.disarm()
    assert native == (torch.nn.Module.load_state_dict, torch.optim.Optimizer.load_state_dict)


def once_awaited(copied: Copied, copy: Callable[[], object]) -> threading.Thread:
    """Copy on another thread when somebody waits for it."""

    def run() -> None:
        assert copied.is_awaited.wait(LIMIT), "nobody waited"
        copy()
        copied.set()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def model_with(kind: Callable[[Any], torch.optim.Optimizer]) -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
    model = torch.nn.Linear(4, 4)
    return model, kind(model.parameters())


class Sharpness(torch.optim.SGD):
    """As some optimizers do, it changes weights before it calls the closure."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for each in group["params"]:
                each.data.add_(1)
        return super().step(closure)


KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "fused AdamW": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, max_iter=3),
    "another's": lambda parameters: Sharpness(parameters, lr=0.1),
}


GIVEN = ("nothing", "a closure", "a closure by name")


@pytest.mark.parametrize(
    ("kind", "given"),
    [(kind, given) for kind in KINDS for given in GIVEN[kind == "LBFGS" :]],  # which needs one
)
def test_a_step_waits_before_it_changes_anything(ledger: Ledger, kind: str, given: str) -> None:
    model, optimizer = model_with(KINDS[kind])
    before = model.weight.detach().clone()
    found: list[bool] = []

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        ledger.said.append("closure")
        return loss

    closure()
    ledger.said.clear()
    ledger.arm()

    def copy() -> None:
        found.append(torch.equal(model.weight, before))
        ledger.said.append("copied")

    thread = once_awaited(ledger.copied, copy)
    if given == "nothing":
        optimizer.step()
    elif given == "a closure":
        optimizer.step(closure)
    else:
        optimizer.step(closure=closure)
    until_ended(thread)
    overlaps = given != "nothing" and kind != "another's"
    assert found == [True] and not torch.equal(model.weight, before)
    until = ledger.said.index("passed") + 1
    assert ledger.said[:until] == [*["closure"] * overlaps, "copied", "waited", "passed"]
    optimizer.step(closure)
    assert ledger.said.count("passed") == 1, "it is passed once"


def test_a_hook_that_was_registered_later_is_called_too(ledger: Ledger) -> None:
    """torch goes through its hooks while the fence is passed."""
    _, optimizer = model_with(KINDS["SGD"])
    ledger.arm()
    ledger.copied.set()
    hook = register_optimizer_step_pre_hook(lambda *_: ledger.said.append("another hook"))
    optimizer.step()
    hook.remove()
    assert ledger.said == ["passed", "another hook"]


class Interrupted(Copied):
    """A copy during which somebody presses Ctrl-C, once."""

    is_interrupted = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self.is_interrupted:
            self.is_interrupted = True
            raise KeyboardInterrupt
        return super().wait(timeout)


@pytest.mark.parametrize("by", ["a step", "a load", "a save"])
def test_who_goes_on_after_an_interrupt_waits_again(ledger: Ledger, by: str) -> None:
    model, optimizer = model_with(KINDS["SGD"])
    ledger.arm(Interrupted())
    acts = {
        "a step": optimizer.step,
        "a load": lambda: model.load_state_dict(model.state_dict()),
        "a save": ledger.fence.wait,
    }
    with pytest.raises(KeyboardInterrupt):
        acts[by]()
    thread = once_awaited(ledger.copied, bool)
    optimizer.step()
    assert ledger.said == ["waited", "passed"]
    until_ended(thread)


def test_loading_waits(ledger: Ledger) -> None:
    model, optimizer = model_with(KINDS["SGD"])
    for owner in (model, optimizer):
        ledger.arm()
        thread = once_awaited(ledger.copied, bool)
        owner.load_state_dict(owner.state_dict())
        assert ledger.copied.is_set()
        until_ended(thread)
    assert ledger.said == ["waited", "passed"] * 2


def test_nobody_waits_for_what_is_copied_and_a_second_wait_is_none(ledger: Ledger) -> None:
    ledger.fence.wait()
    ledger.arm()
    ledger.copied.set()
    ledger.fence.wait()
    ledger.fence.wait()
    assert ledger.said == ["passed"]


def test_a_disarmed_fence_keeps_nobody(ledger: Ledger) -> None:
    model, optimizer = model_with(KINDS["SGD"])
    ledger.arm()
    ledger.fence.disarm()
    optimizer.step()
    model.load_state_dict(model.state_dict())
    assert ledger.said == []
