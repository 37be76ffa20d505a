"""The laws for the Trainer with DeepSpeed behind it. DeepSpeed's own tests have the rest."""

from __future__ import annotations

import importlib.util
import itertools
import os
from pathlib import Path
from typing import Any

import pytest
from accelerate.utils import compare_versions

from selection import often

import contract

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
    pytest.mark.skipif(compare_versions("accelerate", "<", "1.9"), reason="refused, as test_seams.py requires"),
]

os.environ.setdefault("DS_ACCELERATOR", "cpu")

EARLY = {"event": "on_substep_end", "step": 8}
LATE = {"event": "on_step_end", "step": 17}

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 1": (1, {"zero": 1, "augment": True}),
    "stage 2 on two ranks": (2, {"zero": 2, "samples": 100, "augment": True, "ema": True}),
    "stage 3 on two ranks": (2, {"zero": 3, "samples": 100, "args": {"bf16": True}}),
}


ORDINARY = {"rows": True, "dropout": 0.0, "samples": 50}
SCALE = {"enabled": "auto", "initial_scale_power": 4, "loss_scale_window": 4, "hysteresis": 1}


def zero(stage: int, *ranks: int, engine: Any = None, **args: Any) -> list[tuple[int, dict[str, Any]]]:
    """Return launches with data as scripts have them; all but the last are killed in the middle of a pass."""
    launches = []
    for each, kill in itertools.zip_longest(ranks, (7, 11)[: len(ranks) - 1]):
        given = {"per_device_train_batch_size": 6 // each, "dataloader_drop_last": True, **args}
        strike = {"event": "on_step_end", "step": kill, "rank": 0} if kill else None
        launches.append((each, {**ORDINARY, "zero": stage, "engine": engine or {}, "args": given, "kill": strike}))
    return launches


LAUNCHES = {
    "stage 0, 2 to 1": zero(0, 2, 1),
    "stage 1, 1 to 2 in bf16": zero(1, 1, 2, bf16=True),
    "stage 2, 2 to 1": zero(2, 2, 1),
    "stage 2, 2 to 3 in fp16": zero(2, 2, 3, fp16=True, engine={"fp16": SCALE}),
    "stage 3, 1 to 2": zero(3, 1, 2),
    "stage 3, 2 to 3 to 1": zero(3, 2, 3, 1),
}
TELLING = ("stage 2, 2 to 1", "stage 3, 1 to 2")


@pytest.mark.parametrize("case", often(LAUNCHES, seldom={*LAUNCHES} - {*TELLING}))
def test_another_number_of_ranks_goes_on(case: str, bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    contract.engine_goes_on(bench, tmp_path, reference, LAUNCHES[case], tolerance=3e-2 if "16" in case else 1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_killed_twice_equals_never(case: str, bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    ranks, config = CASES[case]
    kills = [{**EARLY, "rank": ranks - 1}, {**LATE, "rank": 0}]
    # The trainer counts operations by the parameters that a process holds, which at stage 3 is left to chance.
    ignore = ["logs"] if config["zero"] == 3 else []
    expected = reference(config, ranks)
    contract.interrupted_equals_uninterrupted(bench, tmp_path, config, expected, kills, ranks=ranks, ignore=ignore)


@pytest.mark.thorough
def test_a_damaged_shard_takes_everyone_to_the_previous_checkpoint(bench: contract.Bench, tmp_path: Path) -> None:
    config = {"zero": 2, "samples": 100}
    assert bench.run(tmp_path / "killed", {**config, "kill": {"event": "on_step_end", "step": 13}}, ranks=2).killed
    contract.damaged_is_passed_over(
        bench,
        tmp_path / "run",
        tmp_path / "killed",
        {**config, "kill": {"event": "on_train_begin", "step": 5}},
        lambda file: os.truncate(file, file.stat().st_size // 2),
        "checkpoint-10/global_step10/zero_pp_rank_1_mp_rank_00_optim_states.pt",
        newest="checkpoint-10",
        before="checkpoint-5",
        ranks=2,
    )


@pytest.mark.thorough
def test_a_run_of_the_bare_trainer_is_taken_over(bench: contract.Bench, tmp_path: Path) -> None:
    config = {"zero": 2}
    assert bench.run(tmp_path, {**config, "bare": True, "kill": {"event": "on_step_end", "step": 13}}).killed
    (tmp_path / "out" / "checkpoint-10" / "global_step10" / "mp_rank_00_model_states.pt").unlink()
    outcome = bench.run(tmp_path, {**config, "kill": {"event": "on_train_begin", "step": 5}})
    assert "checkpoint-10 is damaged" in outcome.output and "Resuming from checkpoint-5." in outcome.output
