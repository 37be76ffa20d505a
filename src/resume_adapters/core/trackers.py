"""Experiment trackers: which run they are logging to, so that a resumed run continues it instead of opening another."""

from __future__ import annotations

import os
import sys
from typing import Any

_ENVIRONMENT = {"wandb": "WANDB_RUN_ID", "mlflow": "MLFLOW_RUN_ID"}
"""What each tracker reads the id of the run to continue from."""


def capture() -> dict[str, str]:
    """Return the id of each tracker's active run, by tracker. Imports none of them."""
    found: dict[str, str] = {}
    wandb: Any = sys.modules.get("wandb")
    if wandb is not None and getattr(wandb, "run", None) is not None:
        found["wandb"] = wandb.run.id
    mlflow: Any = sys.modules.get("mlflow")
    if mlflow is not None and (active := mlflow.active_run()) is not None:
        found["mlflow"] = active.info.run_id
    return found


def restore(runs: dict[str, str]) -> None:
    """Let each tracker continue its run when it next starts. What the user set in the environment wins."""
    for tracker, run in runs.items():
        os.environ.setdefault(_ENVIRONMENT[tracker], run)
        if tracker == "wandb":
            os.environ.setdefault("WANDB_RESUME", "allow")
