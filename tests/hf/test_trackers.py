"""A tracker's run goes on: one run in the tracker, however often the job is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

import contract

pytest.importorskip("wandb", reason="W&B is not installed")

ENVIRONMENT = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_PROJECT": "tests"}


def test_wandb_continues_the_same_run(bench: contract.Bench, tmp_path: Path) -> None:
    config = {"args": {"report_to": ["wandb"]}}
    bench.run(tmp_path, {**config, "kill": {"event": "on_step_end", "step": 18}}, env=ENVIRONMENT)
    bench.run(tmp_path, config, env=ENVIRONMENT).require_success()
    runs = {path.name.rsplit("-", 1)[1] for path in (tmp_path / "wandb").glob("offline-run-*")}
    assert len(runs) == 1, f"one run became {len(runs)}"
