"""A Trainer in a restartable block goes on in its processes where a rank failed, bit for bit."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from accelerate.utils import compare_versions

import contract
import recovering

JOB = Path(__file__).parent / "recovery_job.py"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        pytest.param(2, {}, marks=pytest.mark.long),
        pytest.param(2, recovering.ON_DEVICE, id="device", marks=pytest.mark.long),
        pytest.param(3, {}, marks=pytest.mark.long),
    ],
)
def test_a_failure_on_any_rank_changes_nothing(
    bench: contract.Bench, tmp_path: Path, ranks: int, settings: dict[str, str]
) -> None:
    recovering.failures_change_nothing(bench.server, JOB, tmp_path, ranks, settings)


@pytest.mark.thorough
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")
@pytest.mark.skipif(compare_versions("accelerate", "<", "1.9"), reason="refused, as test_seams.py requires")
@pytest.mark.parametrize("stage", [pytest.param("0", marks=pytest.mark.long), "2"])
def test_a_failure_changes_nothing_with_deepspeed(bench: contract.Bench, tmp_path: Path, stage: str) -> None:
    """DeepSpeed's own tests have the rest."""
    recovering.failures_change_nothing_with_deepspeed(bench.server, JOB, tmp_path, stage)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [pytest.param("SHARDED_STATE_DICT", marks=pytest.mark.long), "FULL_STATE_DICT"])
def test_a_failure_changes_nothing_with_fsdp(bench: contract.Bench, tmp_path: Path, kind: str) -> None:
    recovering.failures_change_nothing(bench.server, JOB, tmp_path, 2, settings={"FSDP": kind}, replicated=False)


@pytest.mark.thorough
def test_a_failure_in_a_save_changes_nothing(bench: contract.Bench, tmp_path: Path) -> None:
    recovering.a_failure_in_a_save_changes_nothing(bench.server, JOB, tmp_path)


@pytest.mark.thorough
def test_a_failure_on_any_of_two_nodes_loses_no_step(bench: contract.Bench, tmp_path: Path) -> None:
    recovering.failures_on_two_nodes_change_nothing(bench.server, JOB, tmp_path)


@pytest.mark.thorough
def test_a_rank_that_dies_changes_nothing(bench: contract.Bench, tmp_path: Path) -> None:
    recovering.deaths_change_nothing(bench.server, JOB, tmp_path)
