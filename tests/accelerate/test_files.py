"""The step that the content of a bare Accelerate checkpoint says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from resume_adapters.accelerate.files import ForeignCheckpoints
from resume_adapters.core.checkpoint.validity import ForeignStep
from resume_adapters.errors import CheckpointDamaged


def bare(path: Path, optimizer: object, scheduler: object = None) -> Path:
    path.mkdir()
    torch.save({}, path / "random_states_0.pkl")
    torch.save(optimizer, path / "optimizer.bin")
    if scheduler is not None:
        torch.save(scheduler, path / "scheduler.bin")
    return path


def test_the_step_is_what_optimizer_or_scheduler_count_and_last_the_number_in_the_name(tmp_path: Path) -> None:
    adam = {"state": {0: {"step": torch.tensor(6.0)}, 1: {"step": torch.tensor(5.0)}}}
    plain: dict[str, object] = {"state": {}}
    beside = {"state": {**adam["state"], "total": 60, "norm": torch.tensor(9.0)}}
    detector = ForeignCheckpoints(1, scheduler_steps=2)
    assert detector.step(bare(tmp_path / "best_9000", adam)) == ForeignStep(6)
    assert detector.step(bare(tmp_path / "best_6000", beside)) == ForeignStep(6)
    assert detector.step(bare(tmp_path / "best_8000", plain, {"_step_count": 15})) == ForeignStep(7)
    assert detector.step(bare(tmp_path / "best_7000", plain)) == ForeignStep(7000, is_content=False)
    assert detector.step(bare(tmp_path / "best", plain, {"_step_count": 1})) == ForeignStep(0, is_content=False)
    for number, broken in enumerate(({}, {"state": {0: 3}}, {"state": {0: {"step": "x"}}}, [])):
        with pytest.raises(CheckpointDamaged, match="cannot be read"):
            detector.step(bare(tmp_path / f"broken_{number}", broken))
    assert detector.step(tmp_path) is None
