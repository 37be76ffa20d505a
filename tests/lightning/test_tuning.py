"""Finders of a learning rate or a batch size: what they train is thrown away, and no launch resumes from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import SingleDeviceStrategy

from resume_adapters.errors import UnsupportedSetting
from resume_adapters.lightning import ResumeCallback
from selection import often

import contract

TUNED = {
    "lr_find": (8, 17),
    "learning rate": (8, 17),
    "learning rate of epochs": (8, 17),
    "scale_batch_size": (8, 12),
    "batch size": (8, 12),
}
"""What searches, a Tuner's method or a callback, and the steps of the kills."""


@pytest.mark.parametrize("tuned", often(TUNED))
def test_what_a_finder_trains_leaves_nothing_behind(tuned: str, bench: contract.Bench, tmp_path: Path) -> None:
    """It trains more steps than the first kill needs, so that a checkpoint of it would be resumed from."""
    # Lightning 2.4 doubles a batch once more, and counts an epoch of a search: it then trains fewer steps.
    config = {"tuned": tuned, "validate": True, "trainer": {"max_epochs": 5}}
    bare = contract.uninterrupted(bench, tmp_path / "bare", {**config, "bare": True})
    ours = contract.uninterrupted(bench, tmp_path / "ours", config)
    contract.require_same_steps(ours, bare, start=0)
    contract.require_same_end(ours, bare, ignore=("files",))
    kills = [{"event": "on_train_batch_end", "step": step} for step in TUNED[tuned]]
    contract.interrupted_equals_uninterrupted(bench, tmp_path / "killed", config, ours, kills)


class Failing(BoringModel):
    lr = 0.1

    def training_step(self, *args: Any) -> Any:
        raise ValueError("no batch fits")


def test_a_search_that_fails_is_undone(tmp_path: Path) -> None:
    """Lightning then leaves the callbacks out that it had taken away, and calls none of them."""
    callback = ResumeCallback()
    callbacks = [LearningRateFinder(), ModelCheckpoint(dirpath=tmp_path), callback]
    trainer = pl.Trainer(accelerator="cpu", logger=False, default_root_dir=tmp_path, callbacks=callbacks)
    with pytest.raises(ValueError, match="no batch fits"):
        trainer.fit(Failing())
    assert callback.active_run is None and "save_checkpoint" not in vars(trainer)
    status = json.loads((tmp_path / ".resume" / "status.json").read_bytes())
    assert (status["state"], status["reason"]) == ("failed", "ValueError: no batch fits")


class Late(SingleDeviceStrategy):
    """Loads a checkpoint after it is set up, as FSDP and DeepSpeed do."""

    restore_checkpoint_after_setup = True


def test_a_finder_is_refused_that_searches_before_the_checkpoint_is_loaded(tmp_path: Path) -> None:
    callbacks = [LearningRateFinder(), ModelCheckpoint(dirpath=tmp_path), ResumeCallback()]
    trainer = pl.Trainer(accelerator="cpu", strategy=Late("cpu"), logger=False, callbacks=callbacks)
    with pytest.raises(UnsupportedSetting, match=r"LearningRateFinder searches before .*Tuner\.lr_find"):
        trainer.fit(BoringModel())
