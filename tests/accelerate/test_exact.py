"""Laws 1 and 2 for Accelerate, one process: each case is killed twice and must end as if it never was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from selection import often

import contract

MIDDLE = {"event": "step_end", "step": 13}
EARLY = {"event": "step_end", "step": 8}

SEEDABLE = {"loader": {"use_seedable_sampler": True}}
STATEFUL = {"loader": {"use_stateful_dataloader": True}}
WORKERS = {"workers": 2}
PERSISTENT = {"workers": 2, "persistent": True}

CASES: dict[str, dict[str, Any]] = {
    "plain-augmented": {"augment": True},
    "plain-workers": {"augment": True, **WORKERS},
    "plain-persistent": {"augment": True, **PERSISTENT},
    "seedable-augmented-set-epoch": {**SEEDABLE, "augment": True, "set_epoch": True},
    "seedable-last-batch": {**SEEDABLE, "save_every": 7},
    "seedable-workers": {**SEEDABLE, **WORKERS, "augment": True},
    "stateful": {**STATEFUL, "augment": True},
    "stateful-seedable-set-epoch": {
        "loader": {"use_stateful_dataloader": True, "use_seedable_sampler": True},
        "set_epoch": True,
    },
    "stateful-workers": {**STATEFUL, **WORKERS, "augment": True},
    "stateful-seedable-workers": {
        "loader": {"use_stateful_dataloader": True, "use_seedable_sampler": True},
        **WORKERS,
        "augment": True,
    },
    "stream": {"stream": True, "augment": True},
    "stream-workers": {"stream": True, "augment": True, **WORKERS},
    "odd-epochs": {"samples": 90, "accumulate": 3, "save_every": 3},
    "no-accumulation-bf16": {"accumulate": 1, "samples": 26, "precision": "bf16"},
    "half-with-moments-in-float32": {"half": True, "optimizer": "NAdam"},
    "by-hand": {"by_hand": True, "samples": 48},
    "each-epoch-batch-norm": {"save_every": None, "batch_norm": True},
    "evaluation-persistent": {"evaluate": True, "augment": True, **PERSISTENT},
    "save-at-the-last-batch": {"evaluate": True, "samples": 40, "augment": True},
    "set-epoch-drop-last-clip-compile": {"set_epoch": True, "drop_last": True, "clip": True, "compile": True},
    "scaler-ema-registered": {"scaler": True, "ema": True, "registered": [0, 1]},
    "lora": {"lora": True},
    "two-models": {"second": True},
    "automatic-naming-with": {"naming": True, "limit": 2, "with": True},
    "unwrapped": {"wrapped": False, "evaluate": True, "augment": True},
    "unwrapped-last-batch": {"wrapped": False, "evaluate": True, "save_every": 7, **PERSISTENT},
    "registered-generator": {"own_generator": True, "register_generator": True},
    "own-generator": {"own_generator": True},
    "global-generator": {"own_generator": "global", "evaluate": True, **WORKERS},
    "device": {"device": "walled", "second": True, "own_generator": True, "register_generator": True, "ema": True},
    "device-own-generator": {"device": "walled", "own_generator": True, "evaluate": True},
    "device-scaler": {"device": "walled", "scaler": True, "batch_norm": True},
    "device-by-hand": {"device": "walled", "by_hand": True, "samples": 48},
}

SELDOM = (
    "plain-augmented",
    "plain-workers",
    "plain-persistent",
    "seedable-workers",
    "stateful",
    "stateful-workers",
    "stream",
    "odd-epochs",
    "save-at-the-last-batch",
    "unwrapped",
    "registered-generator",
    "own-generator",
    "device-own-generator",
    "device-by-hand",
)
"""What a loader may be is varied in the tests of the core too, and in ``torch_loop``."""


@pytest.mark.parametrize(
    "case",
    often(
        CASES,
        "seedable-augmented-set-epoch",
        "stateful-seedable-workers",
        "stream-workers",
        "by-hand",
        seldom=SELDOM,
    ),
)
def test_killed_twice_equals_never(case: str, bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    config = CASES[case]
    contract.interrupted_equals_uninterrupted(bench, tmp_path, config, reference(config), [EARLY, MIDDLE])
