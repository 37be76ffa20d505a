"""Laws 1 and 2 for the Trainer: whatever the data, the precision and the wrapping, a kill changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

from selection import often

import contract

EARLY = {"event": "on_step_end", "step": 6}
MIDDLE = {"event": "on_step_end", "step": 13}

STREAM = {"data": "stream", "args": {"max_steps": 21}}
WORKERS = {"dataloader_num_workers": 2}
PERSISTENT = {**WORKERS, "dataloader_persistent_workers": True}
BY_LENGTH: dict[str, Any] = {"train_sampling_strategy": "group_by_length"}
if hasattr(TrainingArguments, "group_by_length"):  # transformers before 5.3
    BY_LENGTH = {"group_by_length": True}
EVALUATE = {"eval_strategy": "steps", "eval_steps": 4}


def job(*, args: dict[str, Any] | None = None, **config: Any) -> dict[str, Any]:
    return {"args": args or {}, **config}


CASES: dict[str, dict[str, Any]] = {
    "no-accumulation-drop-last-bf16": job(
        args={"gradient_accumulation_steps": 1, "dataloader_drop_last": True, "bf16": True}, samples=26
    ),
    "half-with-moments-in-float32": job(half=True, args={"optim": "adafactor"}),
    "augmented": job(augment=True),
    "augmented-workers": job(augment=True, args=WORKERS),
    "augmented-persistent": job(augment=True, args=PERSISTENT),
    "masking-collator": job(mask=True),
    "masking-collator-persistent": job(mask=True, args=PERSISTENT),
    "group-by-length": job(ragged=True, args=BY_LENGTH),
    "plain-sampler": job(augment=True, args={"accelerator_config": {"use_seedable_sampler": False}}),
    "plain-sampler-persistent": job(
        augment=True, args={**PERSISTENT, "accelerator_config": {"use_seedable_sampler": False}}
    ),
    "datasets-map": job(data="datasets"),
    "stream-augmented": job(**STREAM, augment=True),
    "stream-workers": job(data="stream", augment=True, args={"max_steps": 21, **WORKERS}),
    "stream-persistent": job(data="stream", augment=True, args={"max_steps": 21, **PERSISTENT}),
    "stream-set-epoch": job(**STREAM, set_epoch=True, augment=True),
    "stream-set-epoch-workers": job(data="stream", set_epoch=True, args={"max_steps": 21, **WORKERS}),
    "datasets-stream": job(data="datasets-stream", args={"max_steps": 21}),
    "datasets-stream-set-epoch": job(data="datasets-stream", set_epoch=True, args={"max_steps": 21}),
    "datasets-stream-set-epoch-workers": job(
        data="datasets-stream", set_epoch=True, augment=True, args={"max_steps": 21, **WORKERS}
    ),
    "elastic-map": job(elastic=True, augment=True),
    "elastic-map-workers": job(elastic=True, augment=True, args=PERSISTENT),
    "elastic-shards": job(elastic=True, **STREAM, augment=True),
    "elastic-shards-workers": job(elastic=True, data="stream", augment=True, args={"max_steps": 21, **WORKERS}),
    "elastic-shards-persistent": job(elastic=True, data="stream", augment=True, args={"max_steps": 21, **PERSISTENT}),
    "save-each-epoch": job(augment=True, args={"save_strategy": "epoch"}),
    "boundary-persistent": job(
        augment=True,
        args={**PERSISTENT, "save_steps": 7, "accelerator_config": {"use_seedable_sampler": False}},
    ),
    "save-each-epoch-persistent": job(
        augment=True,
        args={**PERSISTENT, "save_strategy": "epoch", "accelerator_config": {"use_seedable_sampler": False}},
    ),
    "evaluations-own-generator": job(own_generator=True, args={**EVALUATE, "save_steps": 5}),
    "evaluations-global-generator": job(own_generator="global", args={**EVALUATE, "save_steps": 5}),
    "evaluations-persistent": job(args={**EVALUATE, **PERSISTENT}),
    "evaluate-each-epoch": job(args={"eval_strategy": "epoch", "save_steps": 7}),
    "lora-and-more": job(lora=True, beside_lora=True),
    "lora-of-pruned-ranks": job(lora="pruned"),
    "torch-compile": job(args={"torch_compile": True, "torch_compile_backend": "eager"}),
    "user-compile": job(user_compile=True, args={"remove_unused_columns": False}),
    "ema": job(ema=True, counting=True),
    "scaler": job(scaler=True),
    "registered-generator": job(own_generator=True, register_generator=True),
    "device": job(device="walled", own_generator=True, register_generator=True),
    "device-own-generator": job(device="walled", own_generator=True),
    "device-scaler": job(device="walled", scaler=True),
    "device-lora": job(device="walled", lora=True, beside_lora=True),
}

SELDOM = (
    "augmented",
    "augmented-workers",
    "masking-collator-persistent",
    "plain-sampler-persistent",
    "datasets-map",
    "stream-augmented",
    "stream-persistent",
    "stream-set-epoch",
    "datasets-stream",
    "datasets-stream-set-epoch",
    "elastic-map",
    "elastic-map-workers",
    "elastic-shards",
    "elastic-shards-persistent",
    "save-each-epoch",
    "boundary-persistent",
    "evaluations-own-generator",
    "evaluate-each-epoch",
    "registered-generator",
    "device-own-generator",
    "device-lora",
    "elastic-shards-workers",
    "save-each-epoch-persistent",
    "user-compile",
)
"""What a loader may be is varied in the tests of the core too, and in ``torch_loop``; another case compiles as well."""


@pytest.mark.parametrize(
    "case",
    often(
        CASES,
        "augmented-persistent",
        "stream-workers",
        "lora-and-more",
        "ema",
        seldom=SELDOM,
    ),
)
def test_killed_twice_equals_never(case: str, bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    config = CASES[case]
    contract.interrupted_equals_uninterrupted(bench, tmp_path, config, reference(config), [EARLY, MIDDLE])
