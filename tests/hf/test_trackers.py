"""The run of each tracker goes on: one run in it, however often the job is killed, and each step with its values."""

from __future__ import annotations

from pathlib import Path

import pytest

import contract
import stores


@pytest.mark.thorough
@pytest.mark.skipif(not stores.are_installed(), reason="the extra `trackers` installs them")
def test_the_callbacks_of_the_trainer_continue_the_run(bench: contract.Bench, tmp_path: Path) -> None:
    config = {"args": {"report_to": ["wandb", "mlflow", "tensorboard"], "logging_steps": 1}}
    stores.continue_the_run(bench, tmp_path, config, {"event": "on_step_end", "step": 18})
