"""Trainings whose directories Lightning numbers: the nth of a process is the nth run."""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger

from resume_adapters.core.session import finished, numbered
from resume_adapters.lightning import ResumeCallback


class Model(BoringModel):
    def __init__(self, lr: float, fails_at: int = -1, **given: Any) -> None:
        super().__init__()
        self.lr = lr
        self.args = Namespace(**given)
        self._fails_at = fails_at

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == self._fails_at:
            raise RuntimeError("it fails")
        TRAINED.append(self.global_step)


TRAINED: list[int] = []
"""The steps of the last training."""


def begin_process() -> None:
    """Forget what this process has trained, as a new one would."""
    numbered._LAST.clear()
    finished._FINISHED.clear()


@pytest.fixture(autouse=True)
def fresh_process() -> Iterator[None]:
    begin_process()
    yield
    begin_process()


def fit(directory: Path, lr: float = 0.1, *, epochs: int = 1, fails_at: int = -1, **given: Any) -> tuple[str, int]:
    """Train as a script without a directory of its own; return the version, and the steps that were trained."""
    trainer = pl.Trainer(
        max_epochs=epochs,
        limit_train_batches=2,
        limit_val_batches=0,
        accelerator="cpu",
        logger=CSVLogger(directory),
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ResumeCallback()],
    )
    torch.manual_seed(1)
    TRAINED.clear()
    with pytest.raises(RuntimeError, match="it fails") if fails_at >= 0 else contextlib.nullcontext():
        trainer.fit(Model(lr, fails_at, epochs=epochs, **given))
    return Path(trainer.checkpoint_callback.dirpath).parent.name, len(TRAINED)  # type: ignore[union-attr]


def test_the_nth_training_of_a_process_is_the_nth_run(tmp_path: Path) -> None:
    assert [fit(tmp_path), fit(tmp_path, epochs=3, fails_at=4)] == [("version_0", 2), ("version_1", 4)]
    begin_process()
    trained = [fit(tmp_path), fit(tmp_path, epochs=3)]
    assert trained == [("version_0", 0), ("version_1", 2)]
    assert fit(tmp_path)[1] == 2, "the third is a new one"


def test_a_finished_run_with_other_settings_is_another_run(tmp_path: Path) -> None:
    assert fit(tmp_path) == ("version_0", 2)
    begin_process()
    (second, steps) = fit(tmp_path, lr=0.2)
    assert second != "version_0" and steps == 2
    begin_process()
    assert fit(tmp_path) == ("version_0", 0), "both are there when they are launched again"
    begin_process()
    assert fit(tmp_path, lr=0.2) == (second, 0)
    begin_process()
    assert fit(tmp_path, width=3)[1] == 0, "an earlier launch said nothing of it"


def test_more_epochs_train_a_finished_run_further(tmp_path: Path) -> None:
    """Also where the module holds how many."""
    assert fit(tmp_path) == ("version_0", 2)
    begin_process()
    assert fit(tmp_path, epochs=2) == ("version_0", 2)


def test_a_run_that_is_not_finished_goes_on_with_other_settings(tmp_path: Path) -> None:
    assert fit(tmp_path, epochs=3, fails_at=4) == ("version_0", 4)
    begin_process()
    assert fit(tmp_path, lr=0.2, epochs=3) == ("version_0", 2)


def test_a_training_that_has_failed_is_tried_again_in_its_process(tmp_path: Path) -> None:
    assert fit(tmp_path, epochs=3, fails_at=4) == ("version_0", 4)
    assert fit(tmp_path, epochs=3) == ("version_0", 2)


def test_another_training_after_one_that_has_failed_is_another_run(tmp_path: Path) -> None:
    """As the trials of a search are, of which some are given up by an error."""
    assert fit(tmp_path, epochs=3, fails_at=4) == ("version_0", 4)
    assert fit(tmp_path, lr=0.2) == ("version_1", 2)


# ---- Several fits of one trainer


def fit_twice(directory: Path, *callbacks: Any, fails_at: int = -1) -> tuple[float, list[int]]:
    """Train one epoch, then three in all; return the sum of the weights, and the steps that were trained."""
    trainer = pl.Trainer(
        max_epochs=1,
        limit_train_batches=2,
        limit_val_batches=0,
        accelerator="cpu",
        logger=False,
        default_root_dir=directory,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
    )
    torch.manual_seed(1)
    TRAINED.clear()
    model = Adaptive(0.1, fails_at)
    with pytest.raises(RuntimeError, match="it fails") if fails_at >= 0 else contextlib.nullcontext():
        trainer.fit(model)
        trainer.fit_loop.max_epochs = 3
        trainer.fit(model)
    return sum(each.sum().item() for each in model.parameters()), [*TRAINED]


class Adaptive(Model):
    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.arange(128.0).view(4, 32) / 128, shuffle=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


@pytest.mark.parametrize(("fails_at", "left"), [(1, [0, 1, 2, 3, 4, 5]), (3, [2, 3, 4, 5]), (5, [4, 5])])
def test_a_further_fit_makes_its_optimizer_anew_killed_or_not(fails_at: int, left: list[int], tmp_path: Path) -> None:
    bare = fit_twice(tmp_path / "bare")
    assert fit_twice(tmp_path / "whole", ResumeCallback()) == bare
    begin_process()
    fit_twice(tmp_path / "run", ResumeCallback(), fails_at=fails_at)
    begin_process()
    assert fit_twice(tmp_path / "run", ResumeCallback()) == (bare[0], left)
    begin_process()
    assert fit_twice(tmp_path / "run", ResumeCallback()) == (bare[0], []), "finished"
