"""Whoever is about to change what is being copied waits, and nobody else does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from resume_adapters.core.staging.fence import Copies, Fence
from waiting import LIMIT, until_ended


class Awaited(Copies):
    """Knows whether somebody waits for it.

    Args:
        tensors: are to be copied.
    """

    def __init__(self, *tensors: torch.Tensor) -> None:
        super().__init__([each.untyped_storage().data_ptr() for each in tensors] or [0])
        self.is_awaited = threading.Event()

    def wait(self) -> None:
        self.is_awaited.set()
        super().wait()

    def wait_for(self, address: int) -> None:
        self.is_awaited.set()
        super().wait_for(address)


class Ledger:
    """What a fence did, in order."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.fence = Fence(lambda seconds: self.said.append("waited"))
        self.fence.install()
        self.copies = Awaited()

    def arm(self, copies: Awaited | None = None) -> None:
        self.copies = copies or Awaited()
        self.fence.arm(self.copies, lambda: self.said.append("passed"))


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    native = replaceable()
    made = Ledger()
    yield made
    made.fence.disarm()
    assert native == replaceable()


def replaceable() -> list[Any]:
    """Return the methods that a fence replaces."""
    module, optimizer = torch.nn.Module, torch.optim.Optimizer
    return [module.load_state_dict, optimizer.load_state_dict, module.named_parameters, module.train]


def once_awaited(copies: Awaited, copy: Callable[[], object]) -> threading.Thread:
    """Copy on another thread when somebody waits for it."""

    def run() -> None:
        assert copies.is_awaited.wait(LIMIT), "nobody waited"
        copy()
        copies.end()

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

    thread = once_awaited(ledger.copies, copy)
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
    ledger.copies.end()
    hook = register_optimizer_step_pre_hook(lambda *_: ledger.said.append("another hook"))
    optimizer.step()
    hook.remove()
    assert ledger.said == ["passed", "another hook"]


class Interrupted(Awaited):
    """A copy during which somebody presses Ctrl-C, once."""

    is_interrupted = False

    def wait(self) -> None:
        if not self.is_interrupted:
            self.is_interrupted = True
            raise KeyboardInterrupt
        super().wait()


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
    thread = once_awaited(ledger.copies, bool)
    optimizer.step()
    assert ledger.said == ["waited", "passed"]
    until_ended(thread)


def test_loading_waits(ledger: Ledger) -> None:
    model, optimizer = model_with(KINDS["SGD"])
    for owner in (model, optimizer):
        ledger.arm()
        thread = once_awaited(ledger.copies, bool)
        owner.load_state_dict(owner.state_dict())
        assert ledger.copies.are_done
        until_ended(thread)
    assert ledger.said == ["waited", "passed"] * 2


def swap(model: torch.nn.Module) -> None:
    """Put zeros in the place of the weights, as averages take their place."""
    for each in model.parameters():
        each.data.zero_()


def test_who_asks_for_the_parameters_gets_each_when_it_is_copied(ledger: Ledger) -> None:
    model, optimizer = model_with(KINDS["SGD"])
    before = model.bias.detach().clone()
    ledger.arm(Awaited(model.weight, model.bias, model.bias))
    copies, found = ledger.copies, []
    copies.done(model.weight.untyped_storage().data_ptr())
    assert next(model.parameters()) is model.weight and not copies.is_awaited.is_set()
    copies.done(model.bias.untyped_storage().data_ptr())  # of two copies, one
    thread = once_awaited(copies, lambda: found.append(torch.equal(model.bias, before)))
    swap(model)
    until_ended(thread)
    assert found == [True] and not model.bias.any()
    assert ledger.said == ["waited"], "what has changed is found at the next step"
    optimizer.step()
    swap(model)
    assert ledger.said == ["waited", "passed"]


def test_who_sets_a_module_to_evaluate_waits_for_what_is_in_it(ledger: Ledger) -> None:
    """After that, averages may take the place of weights that they hold already."""
    frozen, trained = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    model = torch.nn.Sequential(frozen, trained)
    ledger.arm(Awaited(trained.weight))
    assert not frozen.eval().training and model.train().training and not frozen.eval().training
    assert not ledger.copies.is_awaited.is_set(), "a part that is frozen in each step is not copied"
    found: list[bool] = []
    thread = once_awaited(ledger.copies, lambda: found.append(trained.training))
    assert not model.eval().training
    until_ended(thread)
    assert found == [True] and ledger.said == ["waited"]
    assert not model.eval().training and model.train().training


def test_parameters_without_a_storage_keep_nobody(ledger: Ledger) -> None:
    model = torch.nn.Linear(4, 4)
    models = [torch.nn.Linear(4, 4) for _ in range(2)]
    stacked, _ = torch.func.stack_module_state(models)  # type: ignore[arg-type]
    ledger.arm()
    model.register_forward_pre_hook(lambda *_: list(model.parameters()) and None)

    def call(parameters: dict[str, torch.Tensor]) -> Any:
        return torch.func.functional_call(model, parameters, torch.ones(2, 4))

    assert torch.func.vmap(call)(stacked).shape == (2, 2, 4)
    with torch.device("meta"):
        assert len(list(torch.nn.Linear(4, 4).parameters())) == 2
    assert len(list(torch.nn.LazyLinear(4).parameters())) == 2
    assert not ledger.copies.is_awaited.is_set()


def test_a_model_that_asks_or_evaluates_in_its_forward_pass_is_compiled_once(ledger: Ledger) -> None:
    class Typed(torch.nn.Linear):
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            self.train().eval()
            return super().forward(given.to(next(self.parameters()).dtype))

    compiled: list[Any] = []
    model = Typed(4, 4)
    call = torch.compile(model, backend=lambda graph, _: compiled.append(graph) or graph.forward, fullgraph=True)
    for _ in range(3):
        call(torch.ones(2, 4))
        ledger.arm(Awaited(model.weight))
        call(torch.ones(2, 4))
        ledger.copies.end()
        ledger.fence.wait()
    assert len(compiled) == 1


def test_nobody_waits_for_what_is_copied_and_a_second_wait_is_none(ledger: Ledger) -> None:
    ledger.fence.wait()
    ledger.arm()
    ledger.copies.end()
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
