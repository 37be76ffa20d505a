"""The run of each tracker goes on: one run in it, however often the job is killed, and each step with its values."""

from __future__ import annotations

from pathlib import Path

import pytest

import contract
import stores


@pytest.mark.thorough
@pytest.mark.skipif(not stores.are_installed(), reason="the extra `trackers` installs them")
def test_the_trackers_of_accelerate_continue_the_run(bench: contract.Bench, tmp_path: Path) -> None:
    config = {"trackers": ["wandb", "mlflow", "tensorboard"]}
    stores.continue_the_run(bench, tmp_path, config, {"event": "step_end", "step": 18})
