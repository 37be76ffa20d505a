"""Where the wall time of a run went, from entries of its journal."""

from __future__ import annotations

from typing import Any

import pytest

from resume_adapters.core.run_directory.launches import Goodput, goodput, launches
from resume_adapters.core.run_directory.status import RunState, RunStatus

Entries = list[dict[str, Any]]


def entry(time: float, event: str, **facts: Any) -> dict[str, Any]:
    return {"time": time, "event": event, **facts}


def launch(generation: int, began: float, resumed: int, **facts: Any) -> Entries:
    """Return the start of a launch that begins to train ten seconds later."""
    start = entry(began, "start", generation=generation, step=resumed, **facts)
    return [start, entry(began + 10, "running", step=resumed, generation=generation)]


def test_a_run_that_was_never_killed_has_kept_all_its_training() -> None:
    history = [*launch(1, 0, 0), entry(60, "commit", step=50, seconds=4.0), entry(110, "finished", step=100)]
    (only,) = found = launches(history, None, RunState.FINISHED, 100)
    assert (only.step, only.kept, only.saves, only.save_seconds, only.how) == (100, 100, 1, 4.0, "finished")
    assert goodput(found) == Goodput(kept=100.0, repeated=0.0, starting=10.0, away=0.0)
    assert goodput(found).share == pytest.approx(100 / 110)


def test_of_a_killed_launch_the_steps_after_its_last_commit_are_lost_and_its_end_is_when_it_was_last_seen() -> None:
    seen = {"generation": 1, "step": 80, "updated": 90.0}
    history = [
        *launch(1, 0, 0),
        entry(60, "commit", step=50, seconds=1.0),
        *launch(2, 120, 50, former=seen),
        entry(180, "stopped", step=100, reason="SIGTERM"),
    ]
    killed, stopped = found = launches(history, None, RunState.STOPPED, 100)
    assert (killed.how, killed.step, killed.kept, killed.ended) == ("killed", 80, 50, 90.0)
    assert (stopped.how, stopped.reason, stopped.kept) == ("stopped", "SIGTERM", 50)
    assert goodput(found) == Goodput(kept=80 * 50 / 80 + 50, repeated=80 * 30 / 80, starting=20.0, away=30.0)


def test_the_last_launch_has_what_a_start_would_take_now() -> None:
    history = [*launch(1, 0, 0), entry(60, "commit", step=50)]
    status = RunStatus(state=RunState.RUNNING, step=90, generation=1, updated=100.0)
    for state, kept in ((RunState.KILLED, 50), (RunState.RUNNING, 90)):
        (only,) = launches(history, status, state, 50)
        assert (only.how, only.step, only.kept, only.ended) == (state.value, 90, kept, 100.0)


def test_a_rewind_loses_what_earlier_launches_had_kept() -> None:
    history = [
        *launch(1, 0, 0),
        entry(110, "stopped", step=100),
        *launch(2, 110, 100),
        entry(220, "stopped", step=200),
        entry(500, "rewind", step=40),
        *launch(3, 600, 40),
        entry(650, "finished", step=80),
    ]
    found = launches(history, None, RunState.FINISHED, 80)
    assert [each.kept for each in found] == [40, 0, 40]
    assert found[1].ended == 220, "a rewind is by somebody else, later"


def test_steps_that_a_recovery_repeats_are_no_steps_that_are_kept() -> None:
    history = [*launch(1, 0, 0), entry(60, "recovery", step=40, lost=100), entry(110, "finished", step=100)]
    (only,) = found = launches(history, None, RunState.FINISHED, 100)
    assert (only.recoveries, only.repeated) == (1, 100)
    assert goodput(found).kept == 50.0


def test_a_launch_that_never_trained_and_a_clock_that_went_back_count_for_nothing() -> None:
    history = [entry(100, "start", generation=1, step=0), *launch(2, 50, 0), entry(40, "failed", step=0, reason="it")]
    found = launches(history, None, RunState.FAILED, 0)
    assert [each.productive for each in found] == [0.0, 0.0]
    assert min(goodput(found).kept, goodput(found).repeated, goodput(found).away) >= 0.0
    assert launches([entry(0, "commit", step=3)], None, RunState.UNKNOWN, 0) == []
    assert goodput([]).share is None
