"""Where all ranks go on: from all that three ranks may report."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from msgspec.structs import replace

from resume_adapters.core.recovery.plan import Failure, HeldCheckpoint, Level, Plan, Report, decide

FAILURE = Failure(1, 4, "RuntimeError", "lost\nmore", "train.py:3")


def planned(*reports: Report, restarts: int = 0, former: tuple[Failure, ...] = ()) -> Plan:
    return decide(reports, restarts=restarts, max_restarts=3, former=former)


ONE_RANK = [
    Report("run", step, objection, failure, is_updating=is_updating)
    for step in (None, 3, 4)
    for objection, is_updating in (("", False), ("a part has changed", False), ("", True))
    for failure in (None, FAILURE, Failure(2, 4, "ValueError", "refused", "", is_final=True))
]


def test_memory_is_used_only_where_every_rank_holds_the_same_step_whole() -> None:
    for reports in itertools.product(ONE_RANK, repeat=3):
        plan = planned(*reports)
        failures = [each.failure for each in reports if each.failure]
        if any(each.is_final for each in failures):
            assert plan.level is Level.GIVEN_UP and plan.failure.is_final
            continue
        held = {(each.step, each.objection, each.is_updating) for each in reports}
        is_whole = held in ({(3, "", False)}, {(4, "", False)})
        assert plan.level is (Level.MEMORY if is_whole else Level.DISK)
        assert plan.step == (reports[0].step if is_whole else None)
        assert bool(plan.reason) is not is_whole
        assert plan.failure == FAILURE or not failures


@pytest.mark.parametrize(
    ("changed", "level", "reason"),
    [
        ({"restarts": 2}, Level.MEMORY, ""),
        ({"restarts": 3}, Level.GIVEN_UP, "3 times, which is the limit"),
        ({"former": (FAILURE,)}, Level.GIVEN_UP, "the same step has failed twice in the same way"),
        ({"former": (Failure(1, 3, "RuntimeError", "lost\nmore", "train.py:3"),)}, Level.MEMORY, ""),
    ],
)
def test_it_is_given_up_at_the_limit_and_at_a_second_failure_of_the_same_kind(
    changed: dict[str, object], level: Level, reason: str
) -> None:
    plan = planned(Report("run", 4), Report("run", 4, failure=FAILURE), **changed)  # type: ignore[arg-type]
    assert plan.level is level
    assert reason in plan.reason


def test_ranks_that_hold_no_step_together_go_on_from_what_all_have_resumed_from() -> None:
    """One has failed before it knew under which generation it has resumed."""
    old, new = HeldCheckpoint("memory", 1), HeldCheckpoint("memory", 2)
    report = Report("run", failure=FAILURE, kept={"run": old})
    assert planned(report, Report("run", 5, kept={"run": new})).kept == {"run": new}
    assert planned(report, Report("run", 5)).level is Level.DISK
    assert not planned(Report("run", 5, kept={"run": old}), Report("run", 5, kept={"run": old})).kept


BEHIND = Report("run", 4, failure=FAILURE, is_replica=True)
AHEAD = Report("run", 5, is_replica=True, former=(4, ""))


@pytest.mark.parametrize(
    ("changed", "behind"),
    [
        ({"former": None}, {}),
        ({"former": (3, "")}, {}),
        ({"former": (4, "elsewhere")}, {}),
        ({"is_replica": False}, {}),
        ({}, {"is_replica": False}),
        ({}, {"is_updating": True}),
        ({}, {"objection": "a part has changed"}),
        ({}, {"step": None}),
    ],
)
def test_replicas_go_back_to_a_step_whose_weights_one_of_them_has(
    changed: dict[str, Any], behind: dict[str, Any]
) -> None:
    plan = planned(AHEAD, BEHIND, AHEAD)
    assert (plan.level, plan.step, plan.source) == (Level.MEMORY, 4, 1)
    updating = Report("run", 4, is_updating=True, is_replica=True)
    assert planned(updating, BEHIND, AHEAD) == plan
    assert planned(BEHIND, BEHIND).source is None
    plan = planned(AHEAD, replace(BEHIND, **behind), replace(AHEAD, **changed))
    assert plan.level is Level.DISK and plan.reason


def test_ranks_in_different_trainings_do_not_hold_one_state() -> None:
    assert "different trainings" in planned(Report("one", 4, failure=FAILURE), Report("two", 4)).reason


def test_ranks_at_different_places_of_one_step_do_not_hold_one_state() -> None:
    reports = Report("run", 4, failure=FAILURE, place="before an evaluation"), Report("run", 4, place="in an epoch")
    assert "rank 0 step 4 before an evaluation, rank 1 step 4 in an epoch" in planned(*reports).reason


def test_a_rank_that_left_without_a_word_is_a_failure_too() -> None:
    assert "does not say why" in planned(Report("run", 4), Report("run", 4)).failure.message


def test_a_failure_is_named_in_one_line() -> None:
    assert str(FAILURE) == "rank 1 failed after step 4: RuntimeError: lost"
    assert str(Failure(0, None, "ValueError", "no", "")) == "rank 0 failed: ValueError: no"
