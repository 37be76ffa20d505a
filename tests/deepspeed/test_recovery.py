"""A loop around a DeepSpeed engine in a restartable block goes on where a rank failed or died, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import contract
from recovering import CASES, deaths_change_nothing, failures_on_two_nodes_change_nothing, require_undisturbed, results

JOB = Path(__file__).parent / "recovery_job.py"

VARIATIONS: dict[str, dict[str, Any]] = {
    "replicated": {"stage": 0},
    "zero 1": {"stage": 1},
    "zero 2": {"stage": 2},
    "zero 3": {"stage": 3},
    "bf16": {"stage": 0, "precision": "bf16"},
    "fp16": {"stage": 0, "precision": "fp16"},
    "zero 2 in fp16, offloaded": {"stage": 2, "precision": "fp16", "offload": True},
    "zero 3 in bf16": {"stage": 3, "precision": "bf16"},
}

OFTEN = [("zero 3", 2)]
"""What every change must pass; the others are in the session ``long``."""


def settings(name: str) -> dict[str, str]:
    return {"JOB": json.dumps(VARIATIONS[name])}


CASES_HERE = {
    **CASES,
    "accumulating": [["second batch", 0, 2], ["second batch", 1, 10], ["after", 0, 11]],
    "saving": [["save", 1, 5]],
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        pytest.param(name, ranks, marks=[] if (name, ranks) in OFTEN else pytest.mark.long)
        for name in VARIATIONS
        for ranks in (2, 3)
    ],
)
def test_a_failure_on_any_rank_changes_nothing(bench: contract.Bench, tmp_path: Path, ranks: int, name: str) -> None:
    for found in results(bench.server, JOB, tmp_path, ranks, CASES_HERE, settings=settings(name)):
        levels = require_undisturbed(found)
        assert levels["in turn"].count("memory") >= 3
        assert levels["accumulating"] == [None, "memory", "memory", "memory"]
        assert levels["saving"] == [None, "memory"]
        assert set(levels["updating"][1:]) == {"disk"}  # torch's optimizer is not asked where the step overflows
        assert set(levels["at once"][1:]) == {"memory"}  # the later of the two faults may come in the second attempt


@pytest.mark.thorough
@pytest.mark.parametrize("name", [pytest.param("replicated", marks=pytest.mark.long), "zero 3"])
def test_a_failure_of_a_single_process_changes_nothing(bench: contract.Bench, tmp_path: Path, name: str) -> None:
    cases = {"whole": [], "alone": [["forward", 0, 3], ["before", 0, 7], ["second batch", 0, 10]]}
    for found in results(bench.server, JOB, tmp_path, 1, cases, settings=settings(name)):
        assert require_undisturbed(found)["alone"] == [None, "memory", "disk", "memory"]


@pytest.mark.thorough
def test_a_failure_after_a_step_that_overflowed_changes_nothing(bench: contract.Bench, tmp_path: Path) -> None:
    """Torch's optimizer has made no step, and the scale and the counters have changed."""
    cases = {"whole": [], "overflowed": [["after second batch", 1, 1], ["after second batch", 0, 2]]}
    for found in results(bench.server, JOB, tmp_path, 2, cases, settings=settings("zero 2 in fp16, offloaded")):
        assert require_undisturbed(found)["overflowed"] == [None, "disk", "disk"]
        skipped = {step: seen[-1] for step, seen in found["whole"]["steps"].items() if "batch" in step}
        assert [skipped[f"{step}, batch {2 * step}"] for step in (1, 2, 3)] == [1, 2, 3]


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.long), 3])
def test_a_failure_on_one_rank_while_it_builds_its_model_changes_nothing(
    bench: contract.Bench, tmp_path: Path, ranks: int
) -> None:
    """The others have numbered more parameters by then, and ZeRO 3 compares the numbers."""
    cases = {"whole": [], "building": [["build", 1, 0], ["forward", 0, 7]]}
    for found in results(bench.server, JOB, tmp_path, ranks, cases, settings=settings("zero 3")):
        assert require_undisturbed(found)["building"] == [None, "disk", "memory"]


@pytest.mark.thorough
@pytest.mark.parametrize("name", [pytest.param("replicated", marks=pytest.mark.long), "zero 3"])
def test_a_rank_that_hangs_changes_nothing(bench: contract.Bench, tmp_path: Path, name: str) -> None:
    given = {"JOB": json.dumps({**VARIATIONS[name], "block": {"grace": 0.5, "hang_after": 5.0}})}
    cases = {"whole": [], "hung": [["forward", 1, 7, "hang"], ["second batch", 0, 11, "hang"]]}
    for found in results(bench.server, JOB, tmp_path, 2, cases, settings=given):
        assert require_undisturbed(found)["hung"] == [None, "memory", "memory"]
    assert "Hung: rank 1 hangs" in (tmp_path / "output.0").read_text()


@pytest.mark.thorough
def test_a_worker_of_a_loader_that_fails_changes_nothing(bench: contract.Bench, tmp_path: Path) -> None:
    given = {"JOB": json.dumps({**VARIATIONS["zero 2"], "workers": 1})}
    cases = {"whole": [], "in a worker": [["data", 1, 8, "once"], ["forward", 0, 12]]}
    for found in results(bench.server, JOB, tmp_path, 2, cases, settings=given):
        assert require_undisturbed(found)["in a worker"] == [None, "memory", "memory"]


@pytest.mark.thorough
def test_a_failure_on_any_of_two_nodes_loses_no_step(bench: contract.Bench, tmp_path: Path) -> None:
    failures_on_two_nodes_change_nothing(bench.server, JOB, tmp_path, settings("zero 3"))


@pytest.mark.thorough
@pytest.mark.parametrize("name", [pytest.param("replicated", marks=pytest.mark.long), "zero 3"])
def test_a_rank_that_dies_changes_nothing(bench: contract.Bench, tmp_path: Path, name: str) -> None:
    deaths_change_nothing(bench.server, JOB, tmp_path, settings=settings(name))
