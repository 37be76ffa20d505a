"""Laws 1 and 2 for a DeepSpeed loop: interrupted at any step, any number of times, equals uninterrupted."""

from __future__ import annotations

from typing import Any

import pytest

from device.compiled import require_test_device
from selection import often

import contract

WINDOW = {"event": "backward", "step": 8}
"""In an accumulation window: its first gradients are there, and the last checkpoint is of step 5."""
LATE = {"event": "step_end", "step": 18}

WARMUP = {
    "type": "WarmupDecayLR",
    "params": {"warmup_min_lr": 0, "warmup_max_lr": 5e-3, "warmup_num_steps": 6, "total_num_steps": 40},
}

ONE: dict[str, dict[str, Any]] = {
    "stage 0": {"augment": True, "ema": True, "begins": True},
    "stage 1": {"stage": 1, "cycle": True},
    "stage 2, own loader": {"stage": 2, "loader": "own", "set_epoch": True, "augment": True},
    "stage 3": {"stage": 3, "augment": True, "begins": True},
    "stage 0 in bf16": {"precision": "bf16"},
    "stage 3 in bf16": {"stage": 3, "precision": "bf16"},
    "stage 0 in fp16": {"precision": "fp16"},
    "stage 2 in fp16": {"stage": 2, "precision": "fp16"},
    "window across epochs": {"samples": 27, "accumulate": 4, "epochs": 6, "save_every": 3, "begins": True},
    "DeepSpeedCPUAdam": {"optimizer": "cpu"},
    "DeepSpeedCPUAdam, stage 2, offload": {"optimizer": "cpu", "stage": 2, "offload": True, "precision": "bf16"},
    "DeepSpeedCPUAdam with moving betas": {"optimizer": "cpu", "stage": 1, "cycle": True},
    "activation checkpointing": {"stage": 1, "recompute": True},
    "device, stage 0 in bf16": {"device": "walled", "precision": "bf16", "ema": True},
    "device, stage 2 in fp16": {"device": "walled", "stage": 2, "precision": "fp16", "recompute": True},
    "FusedAdam": {"optimizer": "fused", "stage": 1, "config": {"scheduler": WARMUP}},
    "FusedAdam, stage 3": {"optimizer": "fused", "stage": 3},
}

SEVERAL: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 0, own buffers": (2, {"batch_norm": True, "rank_seeds": True, "augment": True}),
    "stage 2 in fp16": (2, {"stage": 2, "precision": "fp16", "rank_seeds": True, "begins": True}),
    "stage 3, own loader": (2, {"stage": 3, "loader": "own", "set_epoch": True, "rank_seeds": True}),
    "stage 3, DeepSpeedCPUAdam, offload, disks of their own": (
        2,
        {"stage": 3, "optimizer": "cpu", "offload": True, "rank_seeds": True, "nodes": True},
    ),
    "device, stage 1": (2, {"device": "walled", "stage": 1, "rank_seeds": True}),
    "stage 2 on three": (3, {"stage": 2, "width": 64}),
    "stage 3, ZeRO++ within pairs": (
        4,
        {"stage": 3, "config": {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}},
    ),
}


def on_one(case: str) -> dict[str, Any]:
    """Return a case with as many batches as each of two ranks has."""
    return {"samples": 26, **ONE[case]}


@pytest.mark.parametrize(
    "case",
    often(
        ONE,
        "window across epochs",
    ),
)
def test_killed_twice_equals_never(case: str, bench: contract.Bench, reference: Any, tmp_path: Any) -> None:
    config = on_one(case)
    if "device" in config:
        require_test_device()
    contract.interrupted_equals_uninterrupted(bench, tmp_path, config, reference(config), [WINDOW, LATE])


@pytest.mark.thorough
@pytest.mark.parametrize("case", SEVERAL)
def test_on_several_ranks(case: str, bench: contract.Bench, reference: Any, tmp_path: Any) -> None:
    """The last rank is killed; the first kill is in a window, the second between two steps."""
    ranks, config = SEVERAL[case]
    if "device" in config:
        require_test_device()
    expected = reference({**config, "nodes": False}, ranks)
    kills = [{**WINDOW, "rank": ranks - 1}, {**LATE, "step": 13, "rank": ranks - 1}]
    contract.interrupted_equals_uninterrupted(bench, tmp_path, config, expected, kills, ranks=ranks)


def test_the_loss_scale_falls_and_rises_in_fp16(reference: Any) -> None:
    scales = [line["scale"] for line in reference(on_one("stage 2 in fp16")).steps[0]]
    assert min(scales) < scales[0] and sorted(scales, reverse=True) != scales
