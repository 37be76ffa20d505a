"""The run of each tracker goes on: one run in it, however often the job is killed, and each step once."""

from __future__ import annotations

from pathlib import Path

import pytest

import contract
import stores

for name in ("wandb", "mlflow", "tensorboard"):
    pytest.importorskip(name)


@pytest.mark.thorough
def test_the_trackers_of_accelerate_continue_the_run(bench: contract.Bench, tmp_path: Path) -> None:
    config = {"trackers": ["wandb", "mlflow", "tensorboard"]}
    stores.continue_the_run(bench, tmp_path, config, {"event": "step_end", "step": 18})
