"""The first save of a launch is loaded back into copies of what was prepared."""

from __future__ import annotations

import logging
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


def train(directory: Path, model: Any, *, hook: Any = None, options: Any = None) -> Any:
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
    run = register_for_resume(accelerator, run_dir=directory, save_every=2, **(options or {}))
    with run:
        for _ in run.epochs(1):
            for batch in run.batches(loader):
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                run.step()
    return model


def test_a_model_that_drops_what_it_loads_is_refused_at_the_save(tmp_path: Path) -> None:
    with pytest.raises(NotRestored, match="model differs from checkpoint_2 after loading: bias: saved"):
        train(tmp_path, Forgets(1, 1))
    assert not list(tmp_path.glob("**/manifest.json"))


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
