"""What a training call does to the process and to the trainer's objects; each test trains in the test's own process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from resume_adapters.core.session import finished
from resume_adapters.errors import UnsupportedSetting
from resume_adapters.hf import ResumeCallback


class Line(torch.nn.Module):
    """Two layers, of which a script may freeze one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = torch.nn.Linear(1, 2), torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.second(self.first(x))
        return {"loss": (found - y).square().mean(), "logits": found}


def samples(count: int = 16) -> list[dict[str, torch.Tensor]]:
    return [{"x": torch.tensor([i / 16]), "y": torch.tensor([i / 8])} for i in range(count)]


def arguments(directory: Path, **options: Any) -> TrainingArguments:
    return TrainingArguments(
        **{
            "output_dir": str(directory),
            "max_steps": 4,
            "save_steps": 2,
            "per_device_train_batch_size": 2,
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
            **options,
        }
    )


@pytest.fixture(autouse=True)
def fresh_process() -> Iterator[None]:
    """A process has finished nothing when it starts; what it draws is the same in each test."""
    finished._FINISHED.clear()
    torch.manual_seed(1)
    yield
    finished._FINISHED.clear()


def trainer(directory: Path, *, data: Any = None, model: Any = None, callback: Any = None, **options: Any) -> Trainer:
    return Trainer(
        model=model or Line(),
        args=arguments(directory, **options),
        train_dataset=data or samples(),
        eval_dataset=samples(4),
        callbacks=[callback or ResumeCallback()],
    )


# ---- Two trainings in one process


def test_a_second_training_in_a_finished_directory_is_refused(tmp_path: Path) -> None:
    first = trainer(tmp_path)
    first.train()
    again = trainer(tmp_path)
    with pytest.raises(UnsupportedSetting, match=r"output_dir=\.\.\.\), or ResumeCallback\(run_dir=\.\.\.\)"):
        again.train()
    with pytest.raises(UnsupportedSetting, match="ask for more epochs or steps"):
        first.train()
    first.args.max_steps = 6
    assert first.train().global_step == 6


def test_a_second_training_of_something_else_is_refused(tmp_path: Path) -> None:
    """Further steps on other data, and with layers that were frozen before, are no further steps of the same run."""
    model = Line()
    model.first.requires_grad_(False)
    trainer(tmp_path, model=model).train()
    with pytest.raises(UnsupportedSetting, match="with 12 samples in the dataset, 16 then"):
        trainer(tmp_path, model=model, data=samples(12), max_steps=6).train()
    model.first.requires_grad_(True)
    with pytest.raises(UnsupportedSetting, match="with 4 trained tensors, 2 then"):
        trainer(tmp_path, model=model, max_steps=6).train()


def test_each_training_may_have_a_directory_of_its_own(tmp_path: Path) -> None:
    """The arguments, which folds may share, are as they were afterwards."""
    shared = arguments(tmp_path / "out")
    for fold in (1, 2):
        callback = ResumeCallback(run_dir=tmp_path / f"fold-{fold}")
        of_fold = Trainer(model=Line(), args=shared, train_dataset=samples(), callbacks=[callback])
        assert of_fold.train().global_step == 4
        assert shared.output_dir == str(tmp_path / "out")
        assert (tmp_path / f"fold-{fold}" / "checkpoint-4" / "resume" / "manifest.json").is_file()
    assert not list((tmp_path / "out").iterdir())
