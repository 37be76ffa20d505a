"""Where all ranks go on: from all that three ranks may report."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from msgspec.structs import replace

from resume_adapters.core.recovery.plan import Failure, HeldCheckpoint, Level, Moment, Plan, Report, decide

FAILURE = Failure(1, 4, "RuntimeError", "lost\nmore", "train.py:3")


def planned(*reports: Report, restarts: int = 0, former: tuple[Failure, ...] = ()) -> Plan:
    return decide(reports, restarts=restarts, max_restarts=3, former=former)


ONE_RANK = [
    Report("run", step and Moment(step), objection, failure, is_updating=is_updating)
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
        held = {(each.moment, each.objection, each.is_updating) for each in reports}
        is_whole = held in ({(Moment(3), "", False)}, {(Moment(4), "", False)})
        assert plan.level is (Level.MEMORY if is_whole else Level.DISK)
        assert plan.moment == (reports[0].moment if is_whole else None)
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
    plan = planned(Report("run", Moment(4)), Report("run", Moment(4), failure=FAILURE), **changed)  # type: ignore[arg-type]
    assert plan.level is level
    assert reason in plan.reason


def test_ranks_that_hold_no_step_together_go_on_from_what_all_have_resumed_from() -> None:
    """One has failed before it knew under which generation it has resumed."""
    old, new = HeldCheckpoint("memory", 1), HeldCheckpoint("memory", 2)
    report = Report("run", failure=FAILURE, kept={"run": old})
    assert planned(report, Report("run", Moment(5), kept={"run": new})).kept == {"run": new}
    assert planned(report, Report("run", Moment(5))).level is Level.DISK
    assert not planned(Report("run", Moment(5), kept={"run": old}), Report("run", Moment(5), kept={"run": old})).kept


BEHIND = Report("run", Moment(4), failure=FAILURE, is_replica=True)
AHEAD = Report("run", Moment(5), is_replica=True, former=(Moment(4), Moment(3)))


@pytest.mark.parametrize(
    ("changed", "behind"),
    [
        ({"former": ()}, {}),
        ({"former": (Moment(3),)}, {}),
        ({"former": (Moment(4, "elsewhere"),)}, {}),
        ({"is_replica": False}, {}),
        ({}, {"is_replica": False}),
        ({}, {"is_updating": True}),
        ({}, {"objection": "a part has changed"}),
        ({}, {"moment": None}),
    ],
)
def test_replicas_go_back_to_a_step_whose_weights_one_of_them_has(
    changed: dict[str, Any], behind: dict[str, Any]
) -> None:
    plan = planned(AHEAD, BEHIND, AHEAD)
    assert (plan.level, plan.moment, plan.source) == (Level.MEMORY, Moment(4), 1)
    updating = Report("run", Moment(4), is_updating=True, is_replica=True)
    assert planned(updating, BEHIND, AHEAD) == plan
    assert planned(BEHIND, BEHIND).source is None
    plan = planned(AHEAD, replace(BEHIND, **behind), replace(AHEAD, **changed))
    assert plan.level is Level.DISK and plan.reason


def test_ranks_in_different_trainings_do_not_hold_one_state() -> None:
    assert "different trainings" in planned(Report("one", Moment(4), failure=FAILURE), Report("two", Moment(4))).reason


FIRST, SECOND = Moment(4, "in epoch 1"), Moment(4, "in epoch 2")


@pytest.mark.parametrize("is_replica", [True, False])
def test_ranks_at_different_places_of_one_step_go_back_to_the_earlier_with_their_own_weights(is_replica: bool) -> None:
    """One leaves at the end of an epoch; the other has begun the next one before it fails."""
    behind = Report("run", FIRST, is_replica=is_replica, former=(Moment(3),))
    ahead = Report("run", SECOND, failure=FAILURE, is_replica=is_replica, former=(FIRST, Moment(3)))
    assert planned(behind, ahead) == planned(ahead, behind) == Plan(Level.MEMORY, FAILURE, FIRST)
    plan = planned(behind, replace(ahead, is_updating=True))
    assert (plan.moment, plan.source) == ((FIRST, 0) if is_replica else (None, None))
    plan = planned(behind, replace(ahead, former=()))
    assert "rank 0 step 4 in epoch 1, rank 1 step 4 in epoch 2" in plan.reason
    assert planned(behind, replace(ahead, directory="other")).level is Level.DISK


def test_a_rank_that_left_without_a_word_is_a_failure_too() -> None:
    assert "does not say why" in planned(Report("run", Moment(4)), Report("run", Moment(4))).failure.message


def test_a_failure_is_named_in_one_line() -> None:
    assert str(FAILURE) == "rank 1 failed after step 4: RuntimeError: lost"
    assert str(Failure(0, None, "ValueError", "no", "")) == "rank 0 failed: ValueError: no"
