"""Laws 1 and 2 for Lightning: whatever the data, the precision and the callbacks, a kill changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from selection import often

import contract

EARLY = {"event": "on_train_batch_end", "step": 6}
MIDDLE = {"event": "on_train_batch_end", "step": 12}

EACH_EPOCH = {"every_n_train_steps": None, "every_n_epochs": 1}
LAST_BATCH = {"every_n_train_steps": 7}
VALIDATE = {"validate": True, "trainer": {"val_check_interval": 5}}
BEST = {"monitor": "val_loss", "save_top_k": 2, "every_n_train_steps": None}

CASES: dict[str, dict[str, Any]] = {
    "map": {"io": False},
    "augmented": {"augment": True},
    "augmented-workers": {"augment": True, "workers": 2},
    "augmented-persistent": {"augment": True, "workers": 2, "persistent": True},
    "epochs": {"augment": True, "checkpoints": [EACH_EPOCH]},
    "epochs-workers": {"augment": True, "workers": 2, "checkpoints": [EACH_EPOCH]},
    "epochs-persistent": {"augment": True, "workers": 2, "persistent": True, "checkpoints": [EACH_EPOCH]},
    "last-batch": {"augment": True, "checkpoints": [LAST_BATCH]},
    "no-accumulation-bf16-mixed": {
        "trainer": {"accumulate_grad_batches": 1, "precision": "bf16-mixed"},
        "samples": 26,
    },
    "stateful": {"stateful": True, "augment": True},
    "stateful-workers": {"stateful": True, "augment": True, "workers": 2},
    "stateful-last-batch": {"stateful": True, "checkpoints": [LAST_BATCH]},
    "stateful-epochs": {"stateful": True, "checkpoints": [EACH_EPOCH]},
    "stream": {"data": "stream", "augment": True},
    "stream-workers": {"data": "stream", "augment": True, "workers": 2},
    "stream-last-batch": {"data": "stream", "augment": True, "checkpoints": [LAST_BATCH]},
    "stream-epochs": {"data": "stream", "augment": True, "checkpoints": [EACH_EPOCH]},
    "stream-stateful": {"data": "stream", "stateful": True, "augment": True},
    "sized-stream": {"data": "sized-stream", "augment": True},
    "sized-stream-stateful": {"data": "sized-stream", "stateful": True, "augment": True},
    "combined": {"combined": "max_size_cycle", "augment": True},
    "combined-workers": {"combined": "max_size_cycle", "augment": True, "workers": 2},
    "combined-to-the-longest": {"combined": "max_size", "augment": True},
    "combined-to-the-shortest": {"combined": "min_size", "trainer": {"accumulate_grad_batches": 1}},
    "combined-stream": {"combined": "max_size_cycle", "data": "stream", "augment": True},
    "combined-stream-to-the-longest": {"combined": "max_size", "data": "stream", "augment": True},
    "validation-persistent": {"augment": True, "workers": 1, "persistent": True, **VALIDATE},
    "validation-saves": {"augment": True, **VALIDATE, "checkpoints": [BEST]},
    "validation-in-a-window": {"validate": True, "trainer": {"val_check_interval": 3}, "checkpoints": [BEST]},
    "validation-of-saved-batch": {"validate": True, "trainer": {"val_check_interval": 10}},
    "validation-each-epoch": {"validate": True, "checkpoints": [{}, EACH_EPOCH]},
    "several": {**VALIDATE, "checkpoints": [{"save_last": True}, BEST, {**EACH_EPOCH, "filename": "e{epoch}"}]},
    "save-last-link": {"checkpoints": [{"save_last": "link", "save_top_k": 1}]},
    "early-stopping": {**VALIDATE, "patience": 4, "trainer": {"val_check_interval": 5, "max_epochs": 20}},
    "plateau": {"validate": True, "plateau": {"monitor": "val_loss", "interval": "epoch"}, "checkpoints": [EACH_EPOCH]},
    "plateau-steps": {**VALIDATE, "plateau": {"monitor": "val_loss", "strict": False, "interval": "step"}},
    "plateau-train": {"plateau": {"monitor": "train_loss_epoch", "interval": "epoch"}},
    "ema-validation": {"average": "ema", **VALIDATE, "checkpoints": [BEST]},
    "averaging": {"average": "mean"},
    "own-average-limited": {"module_average": True, "augment": True, "trainer": {"limit_train_batches": 11}},
    "manual": {"manual": True, "checkpoints": [{"every_n_train_steps": 10}]},
    "half-with-moments-in-float32": {
        "optimizer": "NAdam",
        "trainer": {"max_steps": 18, "max_epochs": -1, "precision": "bf16-true"},
    },
    "hyperparameters-logger": {"odd_hyperparameters": True, "hyperparameters": {"a": 1}, "logger": True},
    "registered-generator": {"own_generator": True, "register_generator": True},
    "own-generator": {"own_generator": True},
    "device": {"device": "walled", "own_generator": True, "register_generator": True, "average": "ema", **VALIDATE},
    "device-own-generator": {"device": "walled", "own_generator": True},
    "device-manual": {"device": "walled", "manual": True, "checkpoints": [{"every_n_train_steps": 10}]},
    "no-path": {"ckpt_path": None},
}

SELDOM = (
    "map",
    "augmented",
    "augmented-workers",
    "epochs",
    "epochs-persistent",
    "stateful",
    "stateful-epochs",
    "stream",
    "stream-epochs",
    "sized-stream",
    "combined",
    "combined-to-the-shortest",
    "combined-stream",
    "validation-saves",
    "several",
    "plateau-train",
    "averaging",
    "registered-generator",
    "own-generator",
    "device-own-generator",
    "device-manual",
)
"""What a loader may be is varied in the tests of the core too, and in ``torch_loop``."""


@pytest.mark.parametrize(
    "case",
    often(
        CASES,
        "augmented-persistent",
        "stream-workers",
        "early-stopping",
        "ema-validation",
        seldom=SELDOM,
    ),
)
def test_killed_twice_equals_never(case: str, bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    config = CASES[case]
    contract.interrupted_equals_uninterrupted(bench, tmp_path, config, reference(config), [EARLY, MIDDLE])
