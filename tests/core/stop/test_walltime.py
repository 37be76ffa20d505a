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


EVERYTHING = {VARIABLE: "1:00:00", "SLURM_JOB_END_TIME": "9000", "SLURM_JOB_ID": "7"}


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
    assert find("30:00") == (2800.0, "walltime=")
    assert find() == (4600.0, VARIABLE)
    assert find(without=1) == (9000.0, "SLURM_JOB_END_TIME")
    assert find(without=2) == (1500.0 + 7200.0, "squeue")
    assert find(without=3) is None


@pytest.mark.parametrize("answer", ["UNLIMITED", "NOT_SET", "INVALID", "", None])
def test_a_job_without_a_limit_has_none(answer: str | None) -> None:
    assert find(without=2, answer=answer) is None


def test_a_reserve_is_a_minute_until_a_save_is_measured() -> None:
    reserve = ShutdownMargin("auto")
    assert reserve.seconds == UNMEASURED
    for moment in (0.0, 2.0, 40.0, 41.0):
        reserve.polled(moment)
    assert reserve.seconds == 2 * 38 + 10, "steps of 38 s need more than a minute"
    reserve.saved(4.0)
    reserve.saved(20.0)
    reserve.saved(8.0)
    assert reserve.seconds == 1.5 * 20 + 2 * 38 + 10


def test_a_quick_run_needs_little() -> None:
    reserve = ShutdownMargin("auto")
    reserve.polled(0.0)
    reserve.polled(0.1)
    reserve.saved(0.2)
    assert reserve.seconds == pytest.approx(0.3 + 0.2 + 10)


def test_the_time_of_a_save_is_no_step() -> None:
    reserve = ShutdownMargin("auto")
    reserve.polled(0.0)
    reserve.polled(1.0)
    reserve.saved(300.0)
    reserve.paused()
    reserve.polled(302.0)
    assert reserve.seconds == 1.5 * 300 + 2 * 1 + 10


def test_a_reserve_that_is_told_is_kept() -> None:
    reserve = ShutdownMargin("2:00")
    reserve.saved(900.0)
    assert reserve.seconds == 120
