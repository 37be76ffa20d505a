"""The laws for Lightning with DeepSpeed behind it. DeepSpeed's own tests have the rest."""

from __future__ import annotations

import importlib.util
import itertools
import os
from pathlib import Path
from typing import Any

import pytest

from selection import often

import contract
from faults import cut

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")

os.environ.setdefault("DS_ACCELERATOR", "cpu")

FIRST = {"event": "on_train_batch_end", "step": 8}
SECOND = {"event": "on_train_batch_end", "step": 12, "rank": 0}

# Two outputs: on two ranks nothing is padded then, and what DeepSpeed pads with is left to chance.
ENGINE: dict[str, Any] = {"strategy": "deepspeed", "samples": 96, "outputs": 2}

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 0": (1, {**ENGINE, "augment": True}),
    "stage 1": (2, {**ENGINE, "zero": 1, "trainer": {"precision": "bf16-true"}}),
    "stage 2": (2, {**ENGINE, "zero": 2, "augment": True, "validate": True, "trainer": {"val_check_interval": 4}}),
    "stage 3": (2, {**ENGINE, "zero": 3, "checkpoints": [{"save_top_k": 1, "save_last": True}]}),
}


ORDINARY = {**ENGINE, "samples": 48, "rows": True, "dropout": 0.0, "distributed": True}
SCALE = {"initial_scale_power": 4, "loss_scale_window": 4, "hysteresis": 1}


def zero(stage: int, *ranks: int, precision: str = "32", **config: Any) -> list[tuple[int, dict[str, Any]]]:
    """Return launches with a DistributedSampler; all but the last are killed in the middle of a pass."""
    given = {**ORDINARY, "zero": stage, "trainer": {"precision": precision, "gradient_clip_val": 0.5}, **config}
    return [
        (each, {**given, "batch": 6 // each, "kill": kill and {**FIRST, "step": kill, "rank": 0}})
        for each, kill in itertools.zip_longest(ranks, (7, 11)[: len(ranks) - 1])
    ]


LAUNCHES = {
    "stage 0, 1 to 2": zero(0, 1, 2),
    "stage 1, 2 to 1 in bf16": zero(1, 2, 1, precision="bf16-true"),
    "stage 1, 1 to 2 to 3": zero(1, 1, 2, 3),
    "stage 2, 2 to 3": zero(2, 2, 3),
    "stage 2, 1 to 2 in fp16": zero(2, 1, 2, precision="16-true", engine=SCALE),
    "stage 3, 2 to 1": zero(3, 2, 1),
    "stage 3, 1 to 2 to 3": zero(3, 1, 2, 3),
}
TELLING = ("stage 2, 2 to 3", "stage 3, 2 to 1")


@pytest.mark.parametrize("case", often(LAUNCHES, seldom={*LAUNCHES} - {*TELLING}))
def test_another_number_of_ranks_goes_on(case: str, bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    contract.engine_goes_on(bench, tmp_path, reference, LAUNCHES[case], tolerance=3e-2 if "16" in case else 1e-4)


@pytest.mark.parametrize("case", often(CASES))
def test_killed_twice_equals_never(case: str, bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    ranks, config = CASES[case]
    kills = [{**FIRST, "rank": ranks - 1}, SECOND]
    contract.interrupted_equals_uninterrupted(bench, tmp_path, config, reference(config, ranks), kills, ranks=ranks)


@pytest.mark.thorough
def test_a_damaged_shard_takes_everyone_to_the_previous_checkpoint(
    bench: contract.Bench, reference: Any, tmp_path: Path
) -> None:
    ranks, config = CASES["stage 2"]
    assert bench.run(tmp_path / "killed", {**config, "kill": SECOND}, ranks=ranks).killed
    contract.damaged_is_passed_over(
        bench,
        tmp_path / "run",
        tmp_path / "killed",
        {**config, "kill": {**FIRST, "step": 6}},
        cut,
        "epoch=1-step=10.ckpt/checkpoint/zero_pp_rank_1_mp_rank_00_optim_states.pt",
        newest="epoch=1-step=10.ckpt",
        before="epoch=0-step=5.ckpt",
        ranks=ranks,
    )
    contract.require_same_steps(contract.read_trace(tmp_path / "run", ranks), reference(config, ranks), start=5)


@pytest.mark.thorough
def test_a_run_of_bare_lightning_is_taken_over(bench: contract.Bench, tmp_path: Path) -> None:
    config = {**ENGINE, "zero": 2}
    assert bench.run(tmp_path, {**config, "bare": True, "kill": {**FIRST, "step": 13}}).killed
    (tmp_path / "out" / "epoch=0-step=10.ckpt" / "checkpoint" / "mp_rank_00_model_states.pt").unlink()
    outcome = bench.run(tmp_path, {**config, "kill": {**FIRST, "step": 6}})
    assert outcome.killed, outcome.output
    assert "epoch=0-step=10.ckpt is damaged" in outcome.output
    assert "Resuming from epoch=0-step=5.ckpt." in outcome.output
    assert contract.read_trace(tmp_path).first_step == 5


def test_epochs_that_end_in_the_middle_of_a_step_are_refused(bench: contract.Bench, tmp_path: Path) -> None:
    """From the second epoch on DeepSpeed's steps are not Lightning's, and the gradients that it holds are not saved."""
    outcome = bench.run(tmp_path, {**ENGINE, "samples": 100})
    assert "accumulate_grad_batches=2 does not divide the 25 batches of an epoch" in outcome.output, outcome.output
    assert not any(contract.read_trace(tmp_path).steps)
