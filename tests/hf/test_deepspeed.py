"""The laws for the Trainer with DeepSpeed behind it. DeepSpeed's own tests have the rest."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
from accelerate.utils import compare_versions

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


def test_a_run_of_the_bare_trainer_is_taken_over(bench: contract.Bench, tmp_path: Path) -> None:
    config = {"zero": 2}
    assert bench.run(tmp_path, {**config, "bare": True, "kill": {"event": "on_step_end", "step": 13}}).killed
    (tmp_path / "out" / "checkpoint-10" / "global_step10" / "mp_rank_00_model_states.pt").unlink()
    outcome = bench.run(tmp_path, {**config, "kill": {"event": "on_train_begin", "step": 5}})
    assert "checkpoint-10 is damaged" in outcome.output and "Resuming from checkpoint-5." in outcome.output
