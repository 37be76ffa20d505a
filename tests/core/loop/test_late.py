"""What a training changes late, in the middle of a pass, when earlier saves had nothing to say of it."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from resume_adapters.loop import register_for_resume


class Interrupted(Exception):
    pass


class Phase(enum.Enum):
    FIRST = 1
    LATER = 2


def as_is(value: float) -> float:
    return value


def doubled(value: float) -> float:
    return value * 2


class Samples(torch.utils.data.Dataset[Any]):
    def __init__(self) -> None:
        self.phase, self.scale, self.transform = Phase.FIRST, 1.0, as_is

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([self.transform(index / 60) * self.scale + self.phase.value])


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.phase, self.act = torch.nn.Linear(1, 1), Phase.FIRST, torch.nn.ReLU()
        self.dropout = torch.nn.Dropout(0.5)
        self.extra: Any = None

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.act(self.dropout(self.layer(rows) + 1)).mean() * self.phase.value


def train(directory: Path, change: Callable[[Model, Samples], None], kill: int) -> list[float]:
    """Train two epochs of 30 steps, and change something once, after step 18; return the losses."""
    torch.manual_seed(0)
    model, data = Model(), Samples()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(data, 2, shuffle=True)
    run = register_for_resume(directory, model=model, optimizer=optimizer, save_every=2)
    losses: list[float] = []
    try:
        for _ in run.epochs(2):
            for batch in run.batches(loader):
                loss = model(batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                run.step()
                if run.global_step == 18 and len(losses) == 18:
                    change(model, data)
                if run.global_step == kill:
                    raise Interrupted
    except Interrupted:
        run._run.close()
    return losses


def choose_mode(model: Model, data: Samples) -> None:
    model.dropout.eval()


def choose_phase(model: Model, data: Samples) -> None:
    model.phase = data.phase = Phase.LATER
    data.scale = 3.0


def choose_transform(model: Model, data: Samples) -> None:
    data.transform = doubled


def choose_where_none_was(model: Model, data: Samples) -> None:
    model.extra = torch.nn.functional.gelu


def register_hook(model: Model, data: Samples) -> None:
    model.layer.register_forward_hook(lambda module, given, result: result * 2)


def register_hook_of_tensor(model: Model, data: Samples) -> None:
    model.layer.weight.register_hook(lambda gradient: gradient * 2)


def register_hook_on_gradient(model: Model, data: Samples) -> None:
    def double(tensor: torch.Tensor) -> None:
        tensor.grad = None if tensor.grad is None else tensor.grad * 2

    model.layer.weight.register_post_accumulate_grad_hook(double)


def replace_method(model: Model, data: Samples) -> None:
    model.forward = lambda rows: model.layer(rows).mean()  # type: ignore[method-assign]


def choose_module(model: Model, data: Samples) -> None:
    model.act = torch.nn.GELU()


@pytest.mark.parametrize("change", [choose_phase, choose_mode])
def test_what_is_chosen_late_goes_on(tmp_path: Path, change: Any) -> None:
    expected = train(tmp_path / "whole", change, 0)
    early = train(tmp_path / "killed", change, 23)
    assert early + train(tmp_path / "killed", change, 0) == expected[:23] + expected[22:]
    assert expected != train(tmp_path / "never", lambda model, data: None, 0)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (choose_transform, "data MISSING: dataset.transform, a function"),
        (choose_module, "observed MISSING: model.act, a GELU"),
        (register_hook, "observed MISSING: model.layer has hooks"),
        (register_hook_of_tensor, "observed MISSING: model.layer has hooks"),
        (register_hook_on_gradient, "observed MISSING: model.layer has hooks"),
        (replace_method, "observed MISSING: model.forward, a function"),
        (choose_where_none_was, "observed MISSING: model.extra, a builtin_function_or_method"),
    ],
)
def test_code_that_is_chosen_late_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Any, named: str
) -> None:
    with caplog.at_level(logging.WARNING, "resume_adapters"):
        train(tmp_path, change, 0)
    (line,) = (each for each in caplog.messages if "MISSING" in each and "`losses`" not in each)
    assert named in line
