"""The run of DeepSpeed's TensorBoard monitor goes on, and has each step with its values."""

from __future__ import annotations

from pathlib import Path

import pytest

import contract
import stores
from launch import is_installed

pytestmark = pytest.mark.skipif(not is_installed("tensorboard"), reason="the extra `trackers` installs it")


def test_the_monitor_of_the_engine_continues_the_run(bench: contract.Bench, tmp_path: Path) -> None:
    config = {"config": {"tensorboard": {"enabled": True, "output_path": "logs", "job_name": "run"}}}
    kill = {"event": "step_end", "step": 18}
    stores.continue_the_run(bench, tmp_path, config, kill, trackers=["tensorboard"])
