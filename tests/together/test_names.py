"""What a script calls its methods and attributes means nothing: wrappers and engines have some of the same names."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import accelerate
import lightning.pytorch.demos.boring_classes
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import resume_adapters.accelerate
import resume_adapters.fabric
import resume_adapters.loop

NAMES = (
    *("backward", "step", "module", "optimizer", "scheduler", "param_groups", "state", "get_last_lr", "base_lrs"),
    *("parameters", "modules", "buffers", "named_buffers", "sampler", "dataset", "generator", "batch_size", "run"),
    *("_callbacks", "_schedulers", "_forward_module", "_comm_hooks", "detach", "grad_fn", "data_ptr", "to_local"),
    *("shape", "size", "item", "close", "epoch", "save", "load", "history", "best", "memory", "lr", "ids", "group"),
)


ANYTHING = object()
"""Asks for a class whose objects have ``None`` under any name."""

NOT_BARE = {"accelerate": ("model", "optimizer", "schedule", "data"), "fabric": ("model", "optimizer")}
"""Where the framework itself ends, in a training or in a save of its own, as it asks such objects for methods."""


class Killed(Exception):
    """Raised in a loop where a kill would be."""


def method(name: str) -> Any:
    def raising(*_: Any, **__: Any) -> Any:
        raise RuntimeError(f"{name} is the script's own business")

    return raising


def odd(base: Any, value: Any) -> Any:
    """Return a subclass that has methods, attributes or anything under many names that the base does not have."""
    if value is ANYTHING:
        return type("Odd", (base,), {"__getattr__": _none})
    own = {"param_groups", "state"} if issubclass(base, torch.optim.Optimizer) else ()
    free = [name for name in NAMES if not hasattr(base, name) and name not in own]
    return type("Odd", (base,), {name: value or method(name) for name in free})


def _none(it: Any, name: str) -> Any:
    """Return what is registered on a module, else ``None`` for any name, as the settings of many libraries do."""
    if name.startswith("__"):
        raise AttributeError(name)
    held = [vars(it).get(kind, {}) for kind in ("_modules", "_parameters", "_buffers")]
    return next((each[name] for each in held if name in each), None)


class Count:
    """A part of the script's."""

    steps = 0

    def state_dict(self) -> Any:
        return {"steps": self.steps}

    def load_state_dict(self, state: Any) -> None:
        self.steps = state["steps"]


class Rows(Dataset[Any]):
    """Samples of two numbers."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index / 12, 1.0])


class Holder(torch.nn.Module):
    """A model that holds an object of the script's."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.held = held

    def forward(self, batch: Any) -> Any:
        return self.layer(batch)


def train(framework: str, what: str, value: Any, directory: Path | None = None, until: int = 99) -> list[Any]:
    """Run a script of twelve steps, and return its weights, learning rate and count at the end."""

    def of(kind: str, base: Any) -> Any:
        return odd(base, value) if kind == what else base

    torch.manual_seed(3)
    part: Any = of("part", Count)()
    data: Any = DataLoader(of("data", Rows)(), 2, shuffle=True)
    module: Any = of("model", Holder)(of("held", Count)())
    optimizer: Any = of("optimizer", torch.optim.Adam)(module.parameters(), lr=0.1)
    schedule: Any = of("schedule", torch.optim.lr_scheduler.StepLR)(optimizer, 2)
    model, stepper, backward = module, optimizer, torch.Tensor.backward
    given: dict[str, Any] = {"save_every": 2, "part": part}
    if framework == "accelerate":
        accelerator = accelerate.Accelerator(cpu=True)
        model, stepper, data, schedule = accelerator.prepare(module, optimizer, data, schedule)
        backward = accelerator.backward
        run = directory and resume_adapters.accelerate.register_for_resume(accelerator, run_dir=directory, **given)
    elif framework == "fabric":
        fabric = lightning.Fabric(accelerator="cpu", devices=1)
        (model, stepper), data, backward = (
            fabric.setup(module, optimizer),
            fabric.setup_dataloaders(data),
            fabric.backward,
        )
        given |= {"model": model, "optimizer": stepper, "schedule": schedule}
        run = directory and resume_adapters.fabric.register_for_resume(fabric, directory, **given)
    else:
        given |= {"model": model, "optimizer": stepper, "schedule": schedule}
        run = directory and resume_adapters.loop.register_for_resume(directory, **given)
    with run or contextlib.nullcontext():
        for _ in run.epochs(2) if run else range(2):
            for batch in run.batches(data) if run else data:
                backward(model(batch).square().mean())
                stepper.step()
                schedule.step()
                stepper.zero_grad()
                part.steps += 1
                if run:
                    run.step()
                if part.steps == until:
                    raise Killed
    return [module.layer.weight.tolist(), optimizer.param_groups[0]["lr"], part.steps]


@pytest.mark.parametrize("value", [None, "a text", ANYTHING], ids=["methods", "attributes", "anything"])
@pytest.mark.parametrize("what", ["model", "held", "optimizer", "schedule", "part", "data"])
@pytest.mark.parametrize("framework", ["torch", "accelerate", "fabric"])
def test_names_of_the_script_s_own_mean_nothing(framework: str, what: str, value: Any, tmp_path: Path) -> None:
    if value is ANYTHING and what in NOT_BARE.get(framework, ()):
        pytest.skip("the framework itself asks for methods")
    bare = train(framework, what, value)
    assert train(framework, what, value, tmp_path / "whole") == bare
    with pytest.raises(Killed):
        train(framework, what, value, tmp_path / "killed", until=5)
    assert train(framework, what, value, tmp_path / "killed") == bare


def test_a_model_of_lightning_s_trains_with_fabric(tmp_path: Path) -> None:
    # It has a method that DeepSpeed's engines have, too: backward().
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    module: Any = lightning.pytorch.demos.boring_classes.BoringModel()
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    run = resume_adapters.fabric.register_for_resume(fabric, tmp_path, model=model, optimizer=optimizer, save_every=1)
    for _ in run.steps(2):
        fabric.backward(model(torch.ones(2, 32)).mean())
        optimizer.step()
        run.step()
    assert run.global_step == 2
