"""A resumed training continues its runs, and what it sets in the environment lasts until it is closed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from resume_adapters.integrations.trackers.runs import Trackers

import stores

for name in ("wandb", "mlflow", "tensorboard"):
    pytest.importorskip(name)

VARIABLES = ("WANDB_RUN_ID", "WANDB_RESUME", "MLFLOW_RUN_ID")


@pytest.fixture(autouse=True)
def _environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stores in a directory of the test's own, and no variable that says which run to continue."""
    monkeypatch.chdir(tmp_path)
    for name, value in stores.ENVIRONMENT.items():
        monkeypatch.setenv(name, value.replace("///", f"///{tmp_path}/"))
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_closing_gives_back_the_environment(tmp_path: Path) -> None:
    saved = {"wandb": "a", "wandb_step": 3, "mlflow": "b", "tensorboard": [str(tmp_path)], "tensorboard_files": {}}
    environment = dict(os.environ)
    for _ in range(2):
        trackers = Trackers()
        trackers.restore(saved)
        assert trackers.directories == [str(tmp_path)]
        assert {name: os.environ[name] for name in VARIABLES} == dict(zip(VARIABLES, ("a", "allow", "b"), strict=True))
        trackers.close()
        trackers.close()
        assert dict(os.environ) == environment


def test_a_variable_of_the_user_counts_and_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    trackers = Trackers()
    trackers.restore({"wandb": "a", "wandb_step": 3, "mlflow": "b"})
    assert os.environ["WANDB_RUN_ID"] == "mine"
    monkeypatch.setenv("MLFLOW_RUN_ID", "changed since")
    trackers.close()
    assert (os.environ["WANDB_RUN_ID"], os.environ["MLFLOW_RUN_ID"]) == ("mine", "changed since")
    assert "WANDB_RESUME" not in os.environ


class Training:
    """Logs steps to all three trackers, each launch as a process of its own would.

    Args:
        directory: where the stores are.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.trackers = Trackers(lambda: self.writers)
        self.writers: list[Any] = []

    def log(self, steps: Iterator[int] | range, capture_before: int | None = None) -> dict[str, Any]:
        """Log a value for each step; return what was captured before one of them."""
        import mlflow
        import wandb
        from torch.utils.tensorboard import SummaryWriter

        saved: dict[str, Any] = {}
        wandb.init()
        began = int(time.time())
        self.writers = [SummaryWriter(str(self.directory / "logs"))]
        with mlflow.start_run():
            for step in steps:
                if step == capture_before:
                    saved = self.trackers.capture()
                wandb.log({"loss": step / 2}, step=step)
                mlflow.log_metric("loss", step / 2, step=step)
                mlflow.log_metrics({"rate": 1 / (step + 1)}, step=step)
                self.writers[0].add_scalar("loss", step / 2, step)
        self.writers[0].close()
        wandb.finish()
        wandb.teardown()  # its process has then written everything
        while int(time.time()) == began:  # W&B names the directory of a launch after the second
            time.sleep(0.05)
        return saved


@pytest.mark.thorough
def test_a_run_goes_on_after_two_resumes_and_what_is_logged_again_has_the_same_value(
    tmp_path: Path,
) -> None:
    stores.make_database(tmp_path / "mlflow.db")
    saved = Training(tmp_path).log(range(5), capture_before=3)
    for end in (6, 8):
        training = Training(tmp_path)
        training.trackers.restore(saved)
        training.log(range(3, end))
        training.trackers.close()
    for name, read in stores.READERS.items():
        values = {step: set(found) for (key, step), found in read(tmp_path).items() if key == "loss"}
        assert values == {step: {step / 2} for step in range(8)}, name
