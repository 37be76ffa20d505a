"""The run of each tracker goes on: one run in it, however often the job is killed, and each step with its values."""

from __future__ import annotations

from pathlib import Path

import pytest

import contract
import stores


@pytest.mark.thorough
@pytest.mark.skipif(not stores.are_installed(), reason="the extra `trackers` installs them")
def test_the_loggers_of_lightning_continue_the_run(bench: contract.Bench, tmp_path: Path) -> None:
    """Lightning logs the row of a batch, and of an epoch, after the callbacks, and so after the checkpoint of it."""
    each_epoch = {"every_n_train_steps": None, "every_n_epochs": 1, "save_on_train_epoch_end": True}
    config = {
        "trackers": True,
        "validate": True,
        "trainer": {"log_every_n_steps": 1},
        "checkpoints": [{}, each_epoch],
    }
    kills = (
        {"event": "on_train_epoch_end", "step": 7},  # behind the checkpoint of the epoch
        {"event": "on_train_batch_end", "step": 15},  # behind the checkpoint of the batch
        {"event": "on_train_batch_end", "step": 18},
    )
    stores.continue_the_run(bench, tmp_path, config, *kills)
