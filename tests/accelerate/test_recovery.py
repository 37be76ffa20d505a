"""A loop in a restartable block goes on in its processes where a rank failed, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

import contract
from recovering import (
    CASES,
    ON_DEVICE,
    deaths_change_nothing,
    failures_on_two_nodes_change_nothing,
    require_undisturbed,
    results,
)

JOB = Path(__file__).parent / "recovery_job.py"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        pytest.param(2, {}, marks=pytest.mark.long),
        pytest.param(2, ON_DEVICE, id="device"),
        pytest.param(3, {}, marks=pytest.mark.long),
    ],
)
def test_a_failure_on_any_rank_changes_nothing(
    bench: contract.Bench, tmp_path: Path, ranks: int, settings: dict[str, str]
) -> None:
    for found in results(bench.server, JOB, tmp_path, ranks, CASES, settings=settings):
        levels = require_undisturbed(found)
        assert levels["in turn"].count("memory") >= 3
        assert levels["updating"] == [None, "disk", "disk"]
        assert levels["clipped"] == [None, "memory", "memory", "memory"]
        assert set(levels["at once"][1:]) == {"memory"}  # the later of the two faults may come in the second attempt


@pytest.mark.thorough
@pytest.mark.usefixtures("sharding")
@pytest.mark.parametrize("stage", [pytest.param("0", marks=pytest.mark.long), "2"])
def test_a_failure_changes_nothing_with_deepspeed(bench: contract.Bench, tmp_path: Path, stage: str) -> None:
    """DeepSpeed's own tests have the rest."""
    cases = {"whole": [], "in turn": [["forward", 1, 3], ["data", 0, 4], ["backward", 1, 9], ["before", 0, 12]]}
    for found in results(bench.server, JOB, tmp_path, 2, cases, settings={"ZERO": stage}):
        assert require_undisturbed(found)["in turn"] == [None, "memory", "memory", "memory", "disk"]


SELDOM = [pytest.mark.thorough, pytest.mark.long]


@pytest.mark.usefixtures("sharding")
@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        pytest.param(2, {"FSDP": "SHARDED_STATE_DICT"}, marks=pytest.mark.thorough),
        pytest.param(2, {"FSDP": "SHARDED_STATE_DICT", "KEEPS_WHOLE": "1"}, marks=SELDOM),
        pytest.param(4, {"FSDP": "SHARDED_STATE_DICT", "REPLICAS": "2"}, marks=SELDOM),
        pytest.param(2, {"FSDP": "FULL_STATE_DICT"}, marks=SELDOM),
        pytest.param(4, {"FSDP": "FULL_STATE_DICT", "REPLICAS": "2"}, marks=SELDOM),
    ],
)
def test_a_failure_changes_nothing_with_fsdp(
    bench: contract.Bench, tmp_path: Path, ranks: int, settings: dict[str, str]
) -> None:
    faults = [["forward", 1, 3], ["data", 0, 4], ["backward", 1, 6]]
    cases = {"whole": [], "in turn": faults, "updating": [["before", 1, 6]]}
    for found in results(bench.server, JOB, tmp_path, ranks, cases, settings=settings):
        levels = require_undisturbed(found)
        assert levels["in turn"] == [None, "memory", "memory", "memory"]
        assert levels["updating"] == [None, "disk"]


@pytest.mark.thorough
@pytest.mark.parametrize("settings", [{}, {"FSDP": "SHARDED_STATE_DICT"}])
def test_a_failure_on_any_of_two_nodes_loses_no_step(
    settings: dict[str, str], bench: contract.Bench, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if settings:
        request.getfixturevalue("sharding")
    failures_on_two_nodes_change_nothing(bench.server, JOB, tmp_path, settings)


@pytest.mark.thorough
def test_a_rank_that_dies_changes_nothing(bench: contract.Bench, tmp_path: Path) -> None:
    deaths_change_nothing(bench.server, JOB, tmp_path)
