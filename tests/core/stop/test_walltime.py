"""When a run is ended from outside, and how long before it leaves."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from resume_adapters.core.stop.policy import StopOn
from resume_adapters.core.stop.walltime import (
    UNMEASURED,
    VARIABLE,
    Deadline,
    ShutdownMargin,
    describe_shortage,
    find_deadline,
    parse_walltime,
)
from resume_adapters.errors import UnsupportedSetting


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("90", 90),
        ("1.5", 1.5),
        ("50:00", 3000),
        ("11:50:00", 42600),
        ("1-02:03:04", 93784),
        (timedelta(hours=1), 3600),
        (7, 7),
        (" 0:59 ", 59),
    ],
    ids=str,
)
def test_a_time_is_read_as_slurm_writes_it(written: Any, expected: float) -> None:
    assert parse_walltime(written) == expected


@pytest.mark.parametrize("written", ["", "soon", "1:2:3:4", "1-30", "-5", "11h", 0, -1.0, timedelta(), "0:00"], ids=str)
def test_what_is_no_time_is_refused(written: Any) -> None:
    with pytest.raises(UnsupportedSetting):
        parse_walltime(written)
    with pytest.raises(UnsupportedSetting):
        StopOn(walltime=written)
    with pytest.raises(UnsupportedSetting):
        StopOn(reserve=written)


def test_another_scheduler_is_refused() -> None:
    with pytest.raises(UnsupportedSetting, match="invalid requeue='pbs'"):
        StopOn(requeue="pbs")  # type: ignore[arg-type]


EVERYTHING = {VARIABLE: "1:00:00", "SLURM_JOB_END_TIME": "9000", "SLURM_JOB_ID": "7", "SLURM_JOB_START_TIME": "900"}


def find(walltime: Any = None, without: int = 0, answer: str | None = "2:00:00") -> Deadline | None:
    """Ask with everything set but the first few sources; the process began at 1000, and it is 1500 now."""
    environment = dict(list(EVERYTHING.items())[without:])
    asked: list[str] = []

    def ask(job: str) -> str | None:
        asked.append(job)
        return answer

    found = find_deadline(walltime, environment, now=1500.0, began=1000.0, ask=ask)
    assert asked == (["7"] if without == 2 and walltime is None else []), "Slurm is asked only where nothing else says"
    return found


def test_the_first_source_that_says_it_counts() -> None:
    assert find("30:00") == (2800.0, "walltime=", 1000.0)
    assert find() == (4600.0, VARIABLE, 1000.0)
    assert find(without=1) == (9000.0, "SLURM_JOB_END_TIME", 900.0)
    assert find(without=2) == (1500.0 + 7200.0, "squeue", 1000.0)
    assert find(without=3) is None
    ends = {"SLURM_JOB_END_TIME": "9000"}
    older = find_deadline(None, ends, now=1500.0, began=1000.0, ask=lambda job: None)
    assert older == (9000.0, "SLURM_JOB_END_TIME", 1000.0), "Slurm before 22.05 does not say when the job began"


@pytest.mark.parametrize("answer", ["UNLIMITED", "NOT_SET", "INVALID", "", None])
def test_a_job_without_a_limit_has_none(answer: str | None) -> None:
    assert find(without=2, answer=answer) is None


def test_a_reserve_is_a_minute_until_a_save_is_measured() -> None:
    margin = ShutdownMargin("auto")
    assert margin.reserve == UNMEASURED
    for moment in (0.0, 2.0, 40.0, 41.0):
        margin.polled(moment)
    assert margin.reserve == 2 * 38 + 10, "steps of 38 s need more than a minute"
    margin.saved(4.0)
    margin.saved(20.0)
    margin.saved(8.0)
    assert margin.reserve == 1.5 * 20 + 2 * 38 + 10


def test_a_quick_run_needs_little() -> None:
    margin = ShutdownMargin("auto")
    margin.polled(0.0)
    margin.polled(0.1)
    margin.saved(0.2)
    assert margin.reserve == pytest.approx(0.3 + 0.2 + 10)


def test_the_time_of_a_save_is_no_step() -> None:
    margin = ShutdownMargin("auto")
    margin.polled(0.0)
    margin.polled(1.0)
    margin.saved(300.0)
    margin.paused()
    margin.polled(302.0)
    assert margin.reserve == 1.5 * 300 + 2 * 1 + 10


def test_a_reserve_that_is_told_is_kept() -> None:
    margin = ShutdownMargin("2:00")
    margin.saved(900.0)
    assert margin.reserve == 120


def test_before_its_first_step_a_launch_leaves_only_for_what_was_measured() -> None:
    for given, reserve in (("auto", 60.0), ("5:00", 300.0)):
        margin = ShutdownMargin(given)
        assert margin.seconds == 0.0, "nothing is known of a step and a save: it may be quick enough"
        margin.saved(20.0)
        margin.polled(0.0)
        margin.polled(3.0)
        assert margin.seconds == 23.0
        margin.stepped()
        assert margin.seconds == margin.reserve == (46.0 if given == "auto" else reserve)


def test_a_reserve_that_is_shorter_than_what_was_measured_holds_from_the_beginning() -> None:
    margin = ShutdownMargin(5.0)
    margin.saved(20.0)
    assert margin.seconds == 5.0


@pytest.mark.parametrize(
    ("limit", "startup", "has_stepped", "expected"),
    [
        (60.0, 22.0, True, "time limit 60 s, start-up 22 s, reserve 60 s: ask for at least 2 minutes"),
        (600.0, 599.6, False, "time limit 600 s, start-up more than 600 s, reserve 60 s: ask for at least 11 minutes"),
        (None, 120.0, True, "start-up 120 s, reserve 60 s: ask for at least 4 minutes"),
    ],
)
def test_a_shortage_is_described_with_its_figures(
    limit: float | None, startup: float, has_stepped: bool, expected: str
) -> None:
    assert describe_shortage(limit, startup, 60.0, has_stepped=has_stepped) == expected
    assert describe_shortage(None, 22.0, 10.0, has_stepped=True).endswith("at least 1 minute")
