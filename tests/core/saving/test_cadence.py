"""How often a run saves, on a clock of the test's own."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any

import pytest

from resume_adapters.core.saving.cadence import LONGEST, SHORTEST, Cadence, chosen, mean_time_between, optimal
from resume_adapters.errors import UnsupportedSetting

DAY = 24 * 3600.0
HOUR = timedelta(hours=1)


def entry(event: str, time: float) -> dict[str, Any]:
    return {"event": event, "time": time}


def test_steps_are_counted_from_the_first() -> None:
    cadence = Cadence(5)
    cadence.start(0.0)
    assert [step for step in range(21) if cadence.is_due(step, now=1e9)] == [5, 10, 15, 20]
    assert [cadence.next_save(step, 0.0, None) for step in (0, 4, 5, 9)] == [5, 5, 10, 10]


def test_a_time_is_counted_from_the_last_save_whatever_that_was_for() -> None:
    cadence = Cadence(timedelta(minutes=10))
    cadence.start(1000.0)
    assert not cadence.is_due(7, now=1599.0)
    assert cadence.is_due(7, now=1600.0)
    cadence.saved(now=1500.0, cost=3.0)
    assert not cadence.is_due(8, now=2099.0)
    assert cadence.is_due(8, now=2100.0)
    assert cadence.next_save(8, now=2000.0, rate=2.0) == 208
    assert cadence.next_save(8, now=2000.0, rate=None) is None
    assert cadence.next_save(8, now=5000.0, rate=2.0) == 9, "what is overdue comes at the next step"


def test_auto_measures_first_and_then_follows_the_cost() -> None:
    cadence = Cadence("auto", mtbf=timedelta(hours=6))
    cadence.start(0.0)
    assert cadence.interval == SHORTEST.total_seconds()
    cadence.saved(now=60.0, cost=2.0)
    cheap = cadence.interval
    assert cheap == pytest.approx(optimal(2.0, 6 * 3600.0))
    cadence.saved(now=400.0, cost=10.0)
    assert cadence.interval == pytest.approx(optimal(6.0, 6 * 3600.0))
    assert cadence.interval > cheap
    assert not cadence.is_due(1, now=400.0 + cadence.interval - 1)
    assert cadence.is_due(1, now=400.0 + cadence.interval)


@pytest.mark.parametrize(("cost", "expected"), [(1e-6, SHORTEST), (1e4, LONGEST)])
def test_auto_has_bounds(cost: float, expected: timedelta) -> None:
    cadence = Cadence("auto", mtbf=timedelta(days=7))
    cadence.start(0.0)
    cadence.saved(0.0, cost)
    assert cadence.interval == expected.total_seconds()


def test_auto_learns_from_the_journal_and_mtbf_overrides_it() -> None:
    failing = [entry("start", hour * 3600.0) for hour in range(200)]
    told, learned, fresh = Cadence("auto", timedelta(hours=24)), Cadence("auto"), Cadence("auto")
    for cadence, history in ((told, failing), (learned, failing), (fresh, [])):
        cadence.start(0.0, history)
        cadence.saved(0.0, 10.0)
    assert told.interval == fresh.interval
    assert learned.interval < fresh.interval / 3


def wasted(interval: float, cost: float, mtbf: float, generator: random.Random) -> float:
    """Return the share of time lost to saves and to work done twice, in a run of many failures."""
    useful = clock = 0.0
    while useful < 400 * mtbf:
        life = generator.expovariate(1 / mtbf)
        rounds = int(life // (interval + cost))
        useful += rounds * interval
        clock += life
    return 1 - useful / clock


@pytest.mark.parametrize(("cost", "mtbf"), [(5.0, 3600.0), (60.0, 7200.0), (300.0, 3600.0)])
def test_the_optimum_is_one(cost: float, mtbf: float) -> None:
    """A simulated run with random failures loses more with half or with twice the interval."""
    best = optimal(cost, mtbf)
    losses = {factor: wasted(best * factor, cost, mtbf, random.Random(1)) for factor in (0.5, 1.0, 2.0)}
    assert losses[1.0] < losses[0.5]
    assert losses[1.0] < losses[2.0]


def test_the_optimum_of_a_save_that_costs_more_than_a_failure() -> None:
    assert optimal(100.0, 40.0) == 40.0


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        ([], DAY),
        ([entry("start", 0.0)], DAY),
        ([entry("start", 0.0), entry("commit", 3600.0)], DAY),
        ([entry("start", 0.0), entry("commit", 3600.0), entry("start", 9000.0)], (DAY + 3600) / 2),
        ([entry("start", 0.0), entry("stopped", 3600.0), entry("start", 9000.0)], (DAY + 3600) / 2),
        ([entry("start", 0.0), entry("finished", 3600.0), entry("start", 9000.0)], DAY + 3600),
        ([entry("start", 0.0), entry("halted", 3600.0), entry("start", 9000.0)], DAY + 3600),
    ],
    ids=["none", "first", "running", "killed", "stopped", "finished", "halted"],
)
def test_the_journal_tells_how_often_the_run_failed(history: list[dict[str, Any]], expected: float) -> None:
    assert mean_time_between(history) == expected


@pytest.mark.parametrize("every", [0, -5, True, 2.5, timedelta(), timedelta(seconds=-1), "often", None])
def test_what_is_no_cadence_is_refused(every: Any) -> None:
    with pytest.raises(UnsupportedSetting, match="save_every="):
        Cadence(every)


@pytest.mark.parametrize(
    ("every", "mtbf"), [(5, timedelta(hours=1)), ("auto", timedelta()), (None, timedelta(hours=1))]
)
def test_an_mtbf_without_use_is_refused(every: Any, mtbf: timedelta) -> None:
    with pytest.raises(UnsupportedSetting, match="mtbf="):
        chosen(every, mtbf)


def test_the_framework_decides_where_nothing_is_said() -> None:
    assert chosen(None, None) is None
