"""The first save of a hand-written loop is loaded back into copies of what it trains."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from resume_adapters.core.session import finished
from resume_adapters.core.session.rehearsal import NotRehearsed, copies
from resume_adapters.errors import NotRestored, UnsupportedSetting
from resume_adapters.loop import register_for_resume


class Forgets(torch.nn.Linear):
    def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
        found = super().load_state_dict(*arguments, **options)
        torch.nn.init.zeros_(self.bias)
        return found


class Rounds(torch.optim.AdamW):
    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        for each in self.state.values():
            each["exp_avg"] = each["exp_avg"].half()


class Halts(torch.optim.lr_scheduler.StepLR):
    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict({**state_dict, "gamma": 1.0})


class OneMore(torch.nn.Linear):
    """Saves a key that torch's loader does not take, as what samples from its weights does."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.mean = torch.zeros(1)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}mean"] = self.mean

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.mean = self.mean + self.weight.detach().sum()
        return super().forward(batch)


class Nested(OneMore):
    """Its state is no flat dict of tensors."""

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        return {"layers": super().state_dict(*arguments, **options), "names": ["weight", "bias"]}

    def load_state_dict(self, state_dict: Any, *arguments: Any, **options: Any) -> Any:
        return super().load_state_dict(state_dict["layers"], strict=False)


class Plain(OneMore):
    """Has methods of its own, without further arguments."""

    def state_dict(self) -> Any:  # type: ignore[override]
        return super().state_dict()

    def load_state_dict(self, state_dict: Any) -> Any:  # type: ignore[override]
        return super().load_state_dict(state_dict, strict=False)


class Halves(OneMore):
    """Saves half of each weight's bits."""

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        return {name: each.half() for name, each in super().state_dict(*arguments, **options).items()}


class Averages(OneMore):
    """Saves the average of its weights, which is the weights themselves until it trains."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.averages: dict[str, torch.Tensor] = {}

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for name, each in self.named_parameters():
            self.averages[name] = (self.averages.get(name, each.detach()) + each.detach()) / 2
        return super().forward(batch)

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        return {name: self.averages.get(name, each) for name, each in super().state_dict(*arguments, **options).items()}


def halved(optimizer: Any, found: Any) -> Any:
    moments = {number: {name: each.half() for name, each in held.items()} for number, held in found["state"].items()}
    return {**found, "state": moments}


def hooked(*arguments: Any, **options: Any) -> Any:
    made = torch.optim.AdamW(*arguments, **options)
    made.register_state_dict_post_hook(halved)
    return made


class HalfMoments(torch.optim.AdamW):
    """Saves half of each moment's bits."""

    def state_dict(self) -> Any:
        return halved(self, super().state_dict())


class NoMoments(torch.optim.AdamW):
    """Saves no moments: its loader begins with new ones."""

    def state_dict(self) -> Any:
        return {**super().state_dict(), "state": {}}


class Counts(torch.optim.AdamW):
    """Keeps a number and a tensor beside the state of its parameters."""

    def step(self, closure: Any = None) -> Any:
        self.state["steps"] = self.state.get("steps", 0) + 1
        self.state["norm"] = torch.ones(())
        return super().step(closure)


class Within(torch.optim.Optimizer):
    """Steps through another one, of whose state it saves a copy."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.base = torch.optim.AdamW(self.param_groups, lr=lr)
        self.param_groups = self.base.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)

    def state_dict(self) -> Any:
        return {"base": copy.deepcopy(self.base.state_dict())}

    def load_state_dict(self, state_dict: Any) -> None:
        self.base.load_state_dict(state_dict["base"])
        self.param_groups = self.base.param_groups


class Around:
    """No optimizer of torch, but around one, as that of schedulefree."""

    def __init__(self, params: Any, lr: float) -> None:
        self.base = torch.optim.AdamW(params, lr=lr)
        self.zero_grad = self.base.zero_grad
        self.state_dict, self.load_state_dict = self.base.state_dict, self.base.load_state_dict

    def step(self) -> None:
        self.base.step()

    @property
    def param_groups(self) -> Any:
        return self.base.param_groups

    @property
    def state(self) -> Any:
        return self.base.state


class Single(Halves):
    """Has no second one."""

    def __deepcopy__(self, memo: Any) -> Any:
        return self


class Part:
    """A part of the script, which loads its state in some way."""

    is_loaded = False

    def __init__(self, load: Callable[[Part, Any], None], beside: Any = None) -> None:
        self.load, self.beside = load, beside
        self.total, self.count = torch.ones(2), 1

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.load(self, state_dict)


def loads_all(part: Part, state: dict[str, Any]) -> None:
    part.total.copy_(state["total"])
    part.count, part.is_loaded = state["count"], True


def loads_another(part: Part, state: dict[str, Any]) -> None:
    part.total, part.count = state["total"], 0


def loads_what_is_not_there(part: Part, state: dict[str, Any]) -> None:
    part.count = state["steps"]


class Interrupted(Exception):
    pass


def train(
    directory: Path,
    model: torch.nn.Module,
    optimizer: Callable[..., Any] = torch.optim.AdamW,
    schedule: Callable[..., Any] = torch.optim.lr_scheduler.StepLR,
    interrupted_after: int | None = None,
    options: Any = None,
) -> torch.nn.Module:
    torch.manual_seed(0)
    for each in model.parameters():
        torch.nn.init.normal_(each)
    steps = optimizer(model.parameters(), lr=0.1)
    rates = schedule(steps, 2, 0.5)
    loader = torch.utils.data.DataLoader(torch.rand(8, 1, generator=torch.Generator().manual_seed(1)), batch_size=2)
    run = register_for_resume(directory, model=model, optimizer=steps, schedule=rates, save_every=2, **(options or {}))
    with run:
        for epoch in run.epochs(2):
            for index, batch in run.enumerate(loader):
                if epoch * 4 + index == interrupted_after:
                    raise Interrupted
                model(batch).square().mean().backward()
                steps.step()
                rates.step()
                steps.zero_grad()
                run.step()
    return model


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ((Forgets(1, 1),), "model differs from step-2 after loading: bias: saved"),
        ((torch.nn.Linear(1, 1), Rounds), r"optimizer was loaded, .* state\.0\.exp_avg: saved torch\.float32"),
        (
            (torch.nn.Linear(1, 1), torch.optim.AdamW, Halts),
            r"schedule was loaded, .* gamma: saved 0\.5, restored 1\.0",
        ),
    ],
    ids=["model", "optimizer", "schedule"],
)
def test_what_drops_its_state_is_refused_at_the_first_save(given: Any, found: str, tmp_path: Path) -> None:
    with pytest.raises(NotRestored, match=found):
        train(tmp_path, *given)
    assert not list(tmp_path.glob("**/manifest.json"))


@pytest.mark.parametrize(
    ("load", "error", "found"),
    [
        (loads_another, NotRestored, r"average was loaded, .* count: saved 1, restored 0"),
        (loads_what_is_not_there, UnsupportedSetting, r"average does not load what it saves \(KeyError: 'steps'\), so"),
    ],
)
def test_a_part_that_drops_its_state_is_refused_at_the_first_save(
    load: Any, error: type[Exception], found: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=found):
        train(tmp_path / "run", torch.nn.Linear(1, 1), options={"average": Part(load)})
    assert not list(tmp_path.glob("**/manifest.json"))
    for name, options in {"a lock": {}, "not proved": {"verify": False}}.items():
        part = Part(load, None if options else threading.Lock())  # which has no copy
        train(tmp_path / name, torch.nn.Linear(1, 1), options={"average": part, **options})


def test_a_part_is_not_touched(tmp_path: Path) -> None:
    part, model = Part(loads_all), torch.nn.Linear(1, 1)
    part.beside = model
    total = part.total
    train(tmp_path, model, options={"average": part})
    assert part.total is total and part.beside is model and not part.is_loaded


@pytest.mark.parametrize("made", [OneMore, Nested, Plain, Halves, Averages, Single])
def test_what_a_state_dict_changes_or_has_beside_tensors_comes_back(
    made: type[OneMore], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    whole: Any = train(tmp_path / "whole", made(1, 1), options={"verify": False})  # which loads nothing back
    with pytest.raises(Interrupted):
        train(tmp_path / "run", made(1, 1), interrupted_after=5)
    resumed: Any = train(tmp_path / "run", made(1, 1))
    monkeypatch.setattr(finished, "_FINISHED", {})  # as in another process
    again: Any = train(tmp_path / "run", made(1, 1))
    for each in (resumed, again):
        assert torch.equal(each.mean, whole.mean) and torch.equal(each.weight, whole.weight)
    assert ("gives itself as its copy" in caplog.text) is (made is Single)


@pytest.mark.parametrize("made", [HalfMoments, hooked, NoMoments, Within])
def test_what_an_optimizer_does_not_save_as_it_is_comes_back(made: Any, tmp_path: Path) -> None:
    whole: Any = train(tmp_path / "whole", torch.nn.Linear(1, 1), made, options={"verify": False})
    with pytest.raises(Interrupted):
        train(tmp_path / "run", torch.nn.Linear(1, 1), made, interrupted_after=5)
    resumed: Any = train(tmp_path / "run", torch.nn.Linear(1, 1), made)
    assert torch.equal(resumed.weight, whole.weight) and torch.equal(resumed.bias, whole.bias)


def test_what_is_around_an_optimizer_may_be_given_for_it(tmp_path: Path) -> None:
    def schedule(optimizer: Around, *given: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer.base, *given)

    whole: Any = train(tmp_path / "whole", torch.nn.Linear(1, 1))
    with pytest.raises(Interrupted):
        train(tmp_path / "run", torch.nn.Linear(1, 1), Around, schedule, interrupted_after=5)
    resumed: Any = train(tmp_path / "run", torch.nn.Linear(1, 1), Around, schedule)
    assert torch.equal(resumed.weight, whole.weight) and torch.equal(resumed.bias, whole.bias)


def test_an_optimizer_with_state_beside_parameters_is_loaded_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    train(tmp_path, torch.nn.Linear(1, 1), Counts)
    assert "step-2 saved" in caplog.text and "not loaded back" not in caplog.text


def test_a_module_that_holds_one_without_a_copy_has_none() -> None:
    with pytest.raises(NotRehearsed, match="or a module in it, gives itself as its copy"):
        copies({"model": torch.nn.Sequential(Single(1, 1))}, [])


def test_a_scripted_model_trains_as_its_original(tmp_path: Path) -> None:
    plain: Any = train(tmp_path / "plain", torch.nn.Linear(1, 1))
    scripted: Any = train(tmp_path / "scripted", torch.jit.script(torch.nn.Linear(1, 1)))
    assert torch.equal(plain.weight, scripted.weight)
