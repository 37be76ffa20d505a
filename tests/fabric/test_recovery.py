"""A loop in a restartable block goes on where a rank failed or died, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

import contract
from recovering import (
    ON_DEVICE,
    deaths_change_nothing,
    failures_on_two_nodes_change_nothing,
    require_undisturbed,
    results,
)

JOB = Path(__file__).parent / "recovery_job.py"


@pytest.mark.thorough
def test_a_failure_on_a_device_changes_nothing(bench: contract.Bench, tmp_path: Path) -> None:
    cases = {"whole": [], "in turn": [["forward", 1, 3], ["data", 0, 4], ["backward", 1, 9]]}
    for found in results(bench.server, JOB, tmp_path, 2, cases, settings=ON_DEVICE):
        assert require_undisturbed(found)["in turn"] == [None, "memory", "memory", "memory"]


@pytest.mark.thorough
@pytest.mark.long
def test_a_failure_changes_nothing_in_shards(bench: contract.Bench, tmp_path: Path) -> None:
    cases = {"whole": [], "in turn": [["forward", 1, 3], ["data", 0, 4], ["backward", 1, 6]]}
    for found in results(bench.server, JOB, tmp_path, 2, cases, settings={"SHARDS": "sharded"}):
        assert require_undisturbed(found)["in turn"] == [None, "memory", "memory", "memory"]


@pytest.mark.thorough
def test_a_failure_on_any_of_two_nodes_loses_no_step(bench: contract.Bench, tmp_path: Path) -> None:
    failures_on_two_nodes_change_nothing(bench.server, JOB, tmp_path)


@pytest.mark.thorough
def test_a_rank_that_dies_changes_nothing(bench: contract.Bench, tmp_path: Path) -> None:
    deaths_change_nothing(bench.server, JOB, tmp_path)
