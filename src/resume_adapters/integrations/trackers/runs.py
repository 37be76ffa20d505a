"""Experiment trackers: a resumed run continues the tracker's run.

What was logged between the newest checkpoint and the kill is logged again after the resume, with the same values: the
resume is exact. Trackers belong to no framework, so all adapters share this module.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from resume_adapters.errors import CheckpointDamaged, FormatTooNew


class Trackers:
    """The trackers that a training logs to.

    :meth:`restore` sets environment variables; :meth:`close` removes them.

    Args:
        writers: returns the ``SummaryWriter`` objects of TensorBoard that the framework has on this rank.
        mlflow_run: returns the id of a run that the framework logs to without making it MLflow's active one.

    Attributes:
        directories: where TensorBoard's writers wrote to, in the checkpoint that the training resumes from.
    """

    def __init__(
        self, writers: Callable[[], Sequence[Any]] = tuple, mlflow_run: Callable[[], str | None] = lambda: None
    ) -> None:
        self._writers = writers
        self._mlflow_run = mlflow_run
        self._effects = contextlib.ExitStack()
        self.directories: list[str] = []

    def capture(self) -> dict[str, Any]:
        """Return which runs are logged to, by tracker, once MLflow and TensorBoard have written what they hold.

        It imports no tracker.
        """
        found: dict[str, Any] = {}
        wandb: Any = sys.modules.get("wandb")
        if wandb is not None and getattr(wandb, "run", None) is not None:
            # Releases up to 0.2 ask for the step.
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
        """Point each tracker to its run, until :meth:`close`.

        Args:
            saved: what :meth:`capture` returned. A variable that is set in the environment wins over it.
        """
        if "wandb" in saved:
            self._effects.enter_context(_default_variable("WANDB_RUN_ID", saved["wandb"]))
            self._effects.enter_context(_default_variable("WANDB_RESUME", "allow"))
        if "mlflow" in saved:
            self._effects.enter_context(_default_variable("MLFLOW_RUN_ID", saved["mlflow"]))
        self.directories = saved.get("tensorboard", [])

    def close(self) -> None:
        """Remove the variables that :meth:`restore` set."""
        self._effects.close()


@contextlib.contextmanager
def _default_variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable while the context lasts, unless it is set."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        if os.environ.get(name) == value:  # else somebody has changed it since
            del os.environ[name]


def tracker_run(run_directory: str | os.PathLike[str], tracker: str) -> str | None:
    """Return the id of the run that a tracker should continue, for a logger that is made before the training begins.

    Args:
        run_directory: where the checkpoints are.
        tracker: ``"mlflow"`` or ``"wandb"``.

    Returns:
        The id in the newest committed checkpoint; ``None`` without a checkpoint, which is a fresh start.
    """
    # Imported here, since `import resume_adapters` imports this module: they would double its time.
    from resume_adapters.core.checkpoint import layout
    from resume_adapters.core.checkpoint.catalog import candidates
    from resume_adapters.core.checkpoint.files import CheckpointFiles
    from resume_adapters.core.checkpoint.parts import read_part
    from resume_adapters.core.checkpoint.validity import read_manifest
    from resume_adapters.core.storage.local import LocalStorage

    storage = LocalStorage()
    for path in candidates(storage, Path(run_directory)):
        if layout.is_committed(storage, path):
            try:
                files = CheckpointFiles(storage, path, read_manifest(storage, path))
                saved = read_part(files, "trackers", 0)
            except (CheckpointDamaged, FormatTooNew):
                continue  # the resume reports it
            return None if saved is None else saved.get(tracker)
    return None
