"""The first save of a launch is loaded back into copies of what was prepared."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from resume_adapters.accelerate import register_for_resume
from resume_adapters.errors import NotRestored


class Forgets(torch.nn.Linear):
    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        super()._load_from_state_dict({**state_dict, f"{prefix}bias": torch.zeros(1)}, prefix, *arguments)


class Counter:
    """Loads another number than it has saved."""

    def state_dict(self) -> dict[str, int]:
        return {"count": 1}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.state_dict = lambda: {"count": state_dict["count"] + 1}  # type: ignore[method-assign]


class Averaging(torch.nn.Linear):
    """Follows a model by a number that its ``state_dict()`` lacks, which has half of its weights' bits."""

    steps, until = 0, math.inf

    def follow(self, model: Any) -> None:
        self.steps += 1
        if self.steps > self.until:
            raise Interrupted
        for own, each in zip(self.parameters(), model.parameters(), strict=True):
            own.data.lerp_(each.data, 1 / self.steps)

    def state_dict(self) -> Any:  # type: ignore[override]
        return {name: each.half() for name, each in super().state_dict().items()}


class Interrupted(Exception):
    pass


def train(
    directory: Path,
    model: Any,
    *,
    hook: Any = None,
    options: Any = None,
    registers: Iterable[Any] = (),
    after_step: Callable[[Any], Any] = bool,
) -> Any:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    for each in model.parameters():
        torch.nn.init.normal_(each)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    loader = torch.utils.data.DataLoader(torch.rand(8, 1, generator=torch.Generator().manual_seed(1)), batch_size=2)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    if hook is not None:
        accelerator.register_load_state_pre_hook(hook)
    accelerator.register_for_checkpointing(*registers)
    run = register_for_resume(accelerator, run_dir=directory, save_every=2, **(options or {}))
    with run:
        for _ in run.epochs(1):
            for batch in run.batches(loader):
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                after_step(model)
                run.step()
    return model


def test_a_model_that_drops_what_it_loads_is_refused_at_the_save(tmp_path: Path) -> None:
    with pytest.raises(NotRestored, match="model differs from checkpoint_2 after loading: bias: saved"):
        train(tmp_path, Forgets(1, 1))
    assert not list(tmp_path.glob("**/manifest.json"))


def test_what_is_registered_and_drops_its_state_is_refused_at_the_save(tmp_path: Path) -> None:
    with pytest.raises(NotRestored, match=r"Counter was loaded, but .* count: saved 1, restored 2"):
        train(tmp_path, torch.nn.Linear(1, 1), registers=[Counter()])


@pytest.mark.parametrize("is_registered", [True, False])
def test_a_declared_module_comes_back_with_what_its_state_dict_lacks(*, is_registered: bool, tmp_path: Path) -> None:
    def trained(directory: Path, until: float = math.inf) -> torch.Tensor:
        average = Averaging(1, 1)
        average.until = until
        torch.nn.init.zeros_(average.weight)
        given: Any = {"registers": [average]} if is_registered else {"options": {"average": average}}
        train(directory, torch.nn.Linear(1, 1), after_step=average.follow, **given)
        return average.weight

    whole = trained(tmp_path / "whole")
    with pytest.raises(Interrupted):
        trained(tmp_path / "run", until=3)
    assert torch.equal(trained(tmp_path / "run"), whole)


def test_the_training_is_not_touched(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        proved = train(tmp_path / "proved", torch.nn.Linear(1, 1))
    assert "loaded back" not in caplog.text
    other = train(tmp_path / "other", torch.nn.Linear(1, 1), options={"verify": False})
    assert torch.equal(proved.weight, other.weight)


def test_hooks_that_load_are_not_called(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def hook(models: Any, directory: str) -> None:
        raise AssertionError("it may load into what trains")

    with caplog.at_level(logging.INFO):
        train(tmp_path, torch.nn.Linear(1, 1), hook=hook)
    assert "not loaded back to prove it: hooks of the script load it" in caplog.text
