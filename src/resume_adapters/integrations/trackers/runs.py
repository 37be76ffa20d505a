"""Experiment trackers: a resumed run continues the tracker's run, and logs nothing there a second time.

What was logged between the newest checkpoint and the kill is logged again after the resume, with the same values. Each
tracker is kept from holding it twice by what identifies a value there: its name and its step. Trackers belong to no
framework, so all adapters share this module; what it takes the place of in them is in ``_tracker_seams``.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from resume_adapters.core.checkpoint import layout
from resume_adapters.core.checkpoint.catalog import candidates
from resume_adapters.core.checkpoint.parts import read_part
from resume_adapters.core.storage.local import LocalStorage
from resume_adapters.errors import CheckpointDamaged
from resume_adapters.integrations.trackers import deduplicate

_ENVIRONMENT = {"wandb": "WANDB_RUN_ID", "mlflow": "MLFLOW_RUN_ID"}
"""What each tracker reads the id of the run to continue from."""


class Trackers:
    """The trackers that a training logs to.

    Args:
        writers: returns the ``SummaryWriter`` objects of TensorBoard that the framework has on this rank.
        mlflow_run: returns the id of a run that the framework logs to without making it MLflow's active one.

    Attributes:
        directories: those that TensorBoard's writers had in the checkpoint that the training goes on from.
    """

    def __init__(
        self, writers: Callable[[], Sequence[Any]] = tuple, mlflow_run: Callable[[], str | None] = lambda: None
    ) -> None:
        self._writers = writers
        self._mlflow_run = mlflow_run
        self.directories: list[str] = []

    def capture(self) -> dict[str, Any]:
        """Return which runs are logged to, by tracker, once all that was logged is on its way to a disk.

        Imports no tracker.
        """
        found: dict[str, Any] = {}
        wandb: Any = sys.modules.get("wandb")
        if wandb is not None and getattr(wandb, "run", None) is not None:
            found |= {"wandb": wandb.run.id, "wandb_step": wandb.run.step}
        mlflow: Any = sys.modules.get("mlflow")
        if mlflow is not None:
            active = mlflow.active_run()
            run = self._mlflow_run() if active is None else active.info.run_id
            if run is not None:
                mlflow.flush_async_logging()
                found["mlflow"] = run
        tensorboard: Any = sys.modules.get("torch.utils.tensorboard")
        writers = [each for each in self._writers() if tensorboard and isinstance(each, tensorboard.SummaryWriter)]
        for writer in writers:
            writer.flush()
        if writers:
            found["tensorboard"] = [os.path.abspath(writer.log_dir) for writer in writers]
        return found

    def restore(self, saved: dict[str, Any]) -> None:
        """Let each tracker continue its run, and pass over what it has. What the user set in the environment wins."""
        for tracker, variable in _ENVIRONMENT.items():
            if tracker in saved:
                os.environ.setdefault(variable, saved[tracker])
        if "wandb" in saved:
            os.environ.setdefault("WANDB_RESUME", "allow")
            if _is_installed("wandb"):
                deduplicate.log_rows_once(saved["wandb"], saved["wandb_step"])
        if "mlflow" in saved and _is_installed("mlflow"):
            deduplicate.log_metrics_once(saved["mlflow"])
        if "tensorboard" in saved and _is_installed("tensorboard"):
            self.directories = saved["tensorboard"]
            deduplicate.write_summaries_once(saved["tensorboard"])


def tracker_run(run_directory: str | os.PathLike[str], tracker: str) -> str | None:
    """Return the id of the run that a tracker is to continue, for a logger that is made before the training begins.

    Args:
        run_directory: where the checkpoints are.
        tracker: ``"mlflow"`` or ``"wandb"``.

    Returns:
        The id that the newest committed checkpoint knows; ``None`` where there is none: a fresh start.
    """
    for path in candidates(Path(run_directory)):
        if layout.is_committed(path):
            try:
                saved = read_part(LocalStorage(), layout.extras_dir(path), "trackers", 0)
            except CheckpointDamaged:
                continue  # the resume will say so
            return None if saved is None else saved.get(tracker)
    return None


def _is_installed(tracker: str) -> bool:
    return tracker in sys.modules or importlib.util.find_spec(tracker) is not None
