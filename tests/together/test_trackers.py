"""What a resumed training patches in the trackers and sets in the environment lasts until it is closed."""

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


def patched() -> list[Any]:
    """Return what the trackers' classes hold at the places that a resumed training patches."""
    import mlflow
    import wandb
    from torch.utils.tensorboard.writer import FileWriter

    places = ((wandb.Run, "log"), (mlflow.MlflowClient, "log_batch"), (mlflow.MlflowClient, "log_metric"))
    return [vars(owner)[name] for owner, name in (*places, (FileWriter, "add_summary"))]


def test_closing_gives_back_the_methods_and_the_environment(tmp_path: Path) -> None:
    saved = {"wandb": "a", "wandb_step": 3, "mlflow": "b", "tensorboard": [str(tmp_path)]}
    methods, environment = patched(), dict(os.environ)
    for _ in range(100):
        trackers = Trackers()
        trackers.restore(saved)
        assert all(now is not former for now, former in zip(patched(), methods, strict=True))
        assert {name: os.environ[name] for name in VARIABLES} == dict(zip(VARIABLES, ("a", "allow", "b"), strict=True))
        trackers.close()
        trackers.close()
        assert all(now is former for now, former in zip(patched(), methods, strict=True))
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
                wandb.log({"loss": step / 2})
                mlflow.log_metric("loss", step / 2, step=step)
                mlflow.log_metrics({"rate": 1 / (step + 1)}, step=step)
                self.writers[0].add_scalar("loss", step / 2, step)
        self.writers[0].close()
        wandb.finish()
        wandb.teardown()  # its process has then written everything
        while int(time.time()) == began:  # W&B names the directory of a launch after the second
            time.sleep(0.05)
        return saved


def test_a_value_that_is_logged_again_after_each_of_two_resumes_is_there_once(tmp_path: Path) -> None:
    stores.make_database(tmp_path / "mlflow.db")
    saved = Training(tmp_path).log(range(5), capture_before=3)
    for end in (6, 8):
        training = Training(tmp_path)
        training.trackers.restore(saved)
        training.log(range(3, end))
        training.trackers.close()
    for name, read in stores.READERS.items():
        values = read(tmp_path)
        assert {step: found for (key, step), found in values.items() if key == "loss"} == {
            step: [step / 2] for step in range(8)
        }, name


def test_what_a_writer_holds_in_memory_is_not_written_again(tmp_path: Path) -> None:
    """A training that failed and is started again in its process may find its writer open."""
    from torch.utils.tensorboard import SummaryWriter

    writer, trackers = SummaryWriter(str(tmp_path / "logs")), Trackers()
    writer.add_scalar("loss", 0.5, 1)
    trackers.restore({"tensorboard": [str(tmp_path / "logs")]})
    writer.add_scalar("loss", 0.5, 1)
    writer.add_scalar("loss", 1.0, 2)
    trackers.close()
    writer.close()
    assert stores.READERS["tensorboard"](tmp_path) == {("loss", 1): [0.5], ("loss", 2): [1.0]}


def test_values_that_share_a_tag_and_a_step_are_all_there(tmp_path: Path) -> None:
    """What was logged before the checkpoint says nothing of what comes; what each launch logs first is there once."""
    from torch.utils.tensorboard import SummaryWriter

    saved: dict[str, Any] = {}
    for resumes in (False, True, True):
        trackers = Trackers(lambda: [writer])  # noqa: B023
        if resumes:
            trackers.restore(saved)
        writer = SummaryWriter(str(tmp_path / "logs"))
        writer.add_scalar("start", -1.0, 0)
        if not resumes:
            writer.add_scalar("loss", 1.0, 0)
            saved = trackers.capture()
        for value in (2.0, 3.0, 3.0):
            writer.add_scalar("loss", value, 0)
        writer.close()
        trackers.close()
    assert stores.READERS["tensorboard"](tmp_path) == {("start", 0): [-1.0], ("loss", 0): [1.0, 2.0, 3.0, 3.0]}


def test_a_run_that_was_started_before_the_resume_is_closed_too(tmp_path: Path) -> None:
    """W&B looks the method that ``wandb.log`` calls up once, when the run starts."""
    import wandb

    run, trackers = wandb.init(id="a"), Trackers()
    trackers.restore({"wandb": "a", "wandb_step": 3})
    wandb.log({"loss": 1.5})
    trackers.close()
    wandb.log({"loss": 2.0})
    assert wandb.log.__func__ is vars(wandb.Run)["log"]
    run.finish()
    wandb.teardown()
    assert stores.READERS["wandb"](tmp_path) == {("loss", 3): [1.5], ("loss", 4): [2.0]}


def test_a_checkpoint_before_the_first_row_of_a_launch_has_the_step_of_that_row(tmp_path: Path) -> None:
    """Offline, W&B counts from 0 in each launch; a second kill must not let the rows begin there."""
    import wandb

    trackers = Trackers()
    trackers.restore({"wandb": "a", "wandb_step": 3})
    wandb.init()
    steps = [trackers.capture()["wandb_step"]]
    for step, commit in ((None, None), (None, False), (None, True), (8, None), (8, True), (None, None)):
        wandb.log({f"value {len(steps)}": 1.0}, step=step, commit=commit)
        steps.append(trackers.capture()["wandb_step"])
    wandb.finish()
    wandb.teardown()
    trackers.close()
    assert steps == [3, 4, 4, 5, 8, 9, 10]
    rows = [key for key, _ in stores.READERS["wandb"](tmp_path).items()]
    assert {step: {name for name, at in rows if at == step} for step in (3, 4, 8, 9)} == {
        3: {"value 1"},
        4: {"value 2", "value 3"},
        8: {"value 4", "value 5"},
        9: {"value 6"},
    }
