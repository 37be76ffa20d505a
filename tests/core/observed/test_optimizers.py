"""Whatever steps a training is captured: attributes beside a ``state_dict()``, optimizers that nobody registered."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from resume_adapters.core.observed.walk import Subjects
from resume_adapters.core.observed.when import ObservedState


class Drifting(torch.optim.SGD):
    """Steps by what it keeps in attributes, which the ``state_dict()`` that it inherits lacks."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.calls, self.drift = 0, None

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        total = sum(each.grad.sum() for each in self.param_groups[0]["params"])
        self.drift = total if self.drift is None else self.drift * 0.5 + total
        self.param_groups[0]["lr"] = 0.1 / self.calls + float(self.drift) * 1e-3
        return super().step(closure)


class Own(torch.optim.lr_scheduler.LRScheduler):
    level = 1.0

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch}

    def get_lr(self) -> list[Any]:
        self.level = self.level * 0.9
        return [each * self.level for each in self.base_lrs]


class Script:
    """A training, with one optimizer that is registered, and some that live in hooks of the gradients."""

    def __init__(self, saved: Any = None, *, layers: int = 1) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
        self.optimizer = Drifting(self.model[0].parameters())
        self.schedule = Own(self.optimizer)
        hooked = list(self.model[1].parameters())
        self.layers = {each: [torch.optim.Adam([each], lr=0.1) for _ in range(layers)] for each in hooked}
        self.schedules = [torch.optim.lr_scheduler.StepLR(each[0], 1, 0.9) for each in self.layers.values()]
        for each in hooked:
            each.register_post_accumulate_grad_hook(self._step_layer)
        self.state = ObservedState(self._subjects, "register")
        if saved is not None:
            self.state.load(*saved)
        self.state.begin()

    def _step_layer(self, tensor: Any) -> None:
        for each in self.layers[tensor]:
            each.step()
        tensor.grad = None

    def _subjects(self) -> Subjects:
        return Subjects({"model": self.model}, captured=[self.model, self.optimizer, self.schedule])

    def step(self, count: int) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            self.model(torch.ones(4, 2)).square().sum().backward()
            self.optimizer.step()
            for each in (self.schedule, *self.schedules):
                each.step()

    def native(self) -> list[Any]:
        return [self.model.state_dict(), self.optimizer.state_dict(), self.schedule.state_dict()]

    def load(self, native: list[Any]) -> None:
        for each, saved in zip((self.model, self.optimizer, self.schedule), native, strict=True):
            each.load_state_dict(saved)  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    gc.collect()  # the next launch looks through all objects of the process


def test_what_no_state_dict_holds_is_as_in_the_undisturbed_run() -> None:
    undisturbed = Script()
    undisturbed.step(6)
    first = Script()
    first.step(3)
    first.state.before_save()
    saved, native = copy.deepcopy((first.state.capture(), {})), copy.deepcopy(first.native())
    first.state.close()
    noted = " ".join(each.note for each in first.state.describe())
    assert "optimizer.calls, optimizer.drift, schedule.level" in noted
    assert "unregistered optimizers['Adam of 1.weight']" in noted
    del first
    gc.collect()
    again = Script(saved)
    again.load(native)
    again.step(3)
    for one, other in zip(again.model.parameters(), undisturbed.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert [each.last_epoch for each in again.schedules] == [6, 6]


def test_optimizers_that_cannot_be_told_apart_are_named() -> None:
    script = Script(layers=2)
    script.step(1)
    script.state.before_save()
    missing = [each.note for each in script.state.describe() if each.by == "missing"]
    assert any("2 optimizers or schedules, each a Adam of 1.weight, are not registered" in each for each in missing)


def test_an_optimizer_of_tensors_of_no_model_is_left_to_the_census() -> None:
    script, own = Script(), torch.nn.Parameter(torch.ones(2))
    other = torch.optim.SGD([own], lr=0.1)
    own.sum().backward()
    other.step()
    script.state.before_save()
    assert "SGD" not in str(script.state.describe())


class Shared:
    """Two optimizers that step by the same groups, a schedule, and a group that the script holds."""

    def __init__(self) -> None:
        weight = torch.nn.Parameter(torch.ones(2))
        self.outer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
        self.inner = torch.optim.SGD(self.outer.param_groups, lr=0.1)
        self.inner.param_groups = self.outer.param_groups
        self.group = self.outer.param_groups[0]
        self.state = ObservedState(lambda: Subjects({}), "register")

    def load(self, saved: list[Any]) -> None:
        for each, state in zip((self.outer, self.inner), saved, strict=True):
            each.load_state_dict(state)

    @property
    def is_shared(self) -> bool:
        return self.inner.param_groups is self.outer.param_groups and self.outer.param_groups[0] is self.group


def test_a_load_keeps_the_groups_that_optimizers_share_and_a_script_holds() -> None:
    first = Shared()
    first.group["lr"] = 0.05
    saved = copy.deepcopy([first.outer.state_dict(), first.inner.state_dict()])
    again = Shared()
    again.state.begin_loading()
    again.load(saved)
    assert again.is_shared and again.group["lr"] == 0.05
    again.state.begin()
    again.group["params"][0].grad = torch.ones(2)
    again.outer.step()
    again.load(saved)
    assert not again.is_shared, "from the first step on, a script's own loads are as ever"
    again.state.close()


class Hollow(torch.optim.Optimizer):
    """Wraps another, and never calls ``Optimizer.__init__()``."""

    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)


@pytest.mark.parametrize("held", [{}, {"param_groups": []}], ids=["without groups", "with groups"])
def test_a_wrapper_that_is_no_whole_optimizer_is_left_alone(held: dict[str, Any]) -> None:
    wrapper, shared = Hollow(**held), Shared()
    shared.state.begin_loading()
    assert vars(wrapper) == held
    shared.state.close()


def test_groups_that_the_script_has_replaced_are_left_alone() -> None:
    again = Shared()
    saved = copy.deepcopy([again.outer.state_dict(), again.inner.state_dict()])
    again.state.begin_loading()
    other = torch.nn.Parameter(torch.ones(2))
    again.outer.param_groups = [{**again.group, "params": [other]}]
    again.load(saved)
    assert again.outer.param_groups[0]["params"][0] is other and again.group["params"][0] is not other
    again.state.close()


class Outer(torch.optim.Optimizer):
    """Steps through another one, whose state it does not save, as the usual one of sharpness-aware minimization."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.base = torch.optim.Adam(self.param_groups, lr=0.1)
        self.param_groups = self.base.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self.base.param_groups = self.param_groups


class Hiding(Outer):
    """Has a ``state_dict()`` of its own, without that of the other one."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "names": [*self.base.state_dict()]}


class Around:
    """A training by an optimizer around another, with a schedule."""

    def __init__(self, made: type[Outer], saved: Any = None, native: Any = None) -> None:
        self.model = torch.nn.Linear(2, 1)
        torch.nn.init.ones_(self.model.weight)
        self.optimizer = made(self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.native = [self.model, self.optimizer, self.schedule]
        self.state = ObservedState(lambda: Subjects({"model": self.model}, captured=self.native), "register")
        if saved is not None:
            self.state.load(*saved)
            self.state.begin_loading()
            for each, own in zip(self.native, native, strict=True):
                each.load_state_dict(own)
        self.state.begin()

    def step(self, count: int) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            self.model(torch.ones(4, 2)).square().sum().backward()
            self.optimizer.step()
            self.schedule.step()


@pytest.mark.parametrize("made", [Outer, Hiding])
def test_an_optimizer_within_another_that_does_not_save_it_goes_on(made: type[Outer]) -> None:
    whole = Around(made)
    torch.nn.init.zeros_(whole.model.bias)
    whole.step(6)
    first = Around(made)
    torch.nn.init.zeros_(first.model.bias)
    first.step(3)
    first.state.before_save()
    saved = copy.deepcopy((first.state.capture(), {}))
    native = copy.deepcopy([each.state_dict() for each in first.native])
    again = Around(made, saved, native)
    assert again.optimizer.base.param_groups is again.optimizer.param_groups
    again.step(3)
    assert torch.equal(again.model.weight, whole.model.weight)


def test_an_optimizer_that_cannot_be_asked_for_its_state_is_left_alone() -> None:
    script = Script()
    script.step(1)
    script.optimizer.param_groups[0]["params"] = [torch.nn.Parameter(torch.ones(2))]
    with pytest.raises(KeyError):
        script.optimizer.state_dict()
    script.state.before_save()
    assert "state of optimizer" not in str(script.state.describe())
