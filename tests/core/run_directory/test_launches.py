"""Which launches made no progress, as the journal tells it."""

from __future__ import annotations

from typing import Any

import pytest

from resume_adapters.core.run_directory.launches import WastedLaunch, wasted_launches
from resume_adapters.core.run_directory.status import RunState
from resume_adapters.core.stop.policy import WALLTIME

KILLED, FAILED, STOPPED, HALTED = RunState.KILLED, RunState.FAILED, RunState.STOPPED, RunState.HALTED


def history(*entries: tuple[Any, ...]) -> list[dict[str, Any]]:
    """Return a journal; an entry is its event, its step and its reason, and each start has the next generation."""
    starts, written = 0, []
    for event, step, *reason in entries:
        entry = {"time": 1.0, "event": event, "step": step}
        if event == "start":
            starts += 1
            entry["generation"] = starts
        written.append({**entry, "reason": reason[0] if reason else ""})
    return written


def generations(*entries: tuple[Any, ...], **options: Any) -> list[int]:
    return [launch.generation for launch in wasted_launches(history(*entries), **options)]


def test_a_journal_without_a_start_has_no_launch() -> None:
    assert wasted_launches([]) == ()
    assert wasted_launches([{"time": 1.0, "event": "prune"}]) == ()


def test_each_way_to_end_is_known() -> None:
    assert wasted_launches(
        history(
            *[("start", 0), ("running", 0), ("commit", 10)],
            *[("start", 10), ("running", 10), ("resume", 10)],
            *[("start", 10), ("failed", 12, "OutOfMemoryError: CUDA out of memory.\nTried to allocate")],
            *[("start", 10), ("stopped", 10, WALLTIME)],
            *[("start", 10), ("commit", 10), ("halted", 11, "look at it")],
        )
    ) == (
        WastedLaunch(2, 10, KILLED),
        WastedLaunch(3, 10, FAILED, 12, "OutOfMemoryError: CUDA out of memory.\nTried to allocate"),
        WastedLaunch(4, 10, STOPPED, 10, WALLTIME),
        WastedLaunch(5, 10, HALTED, 11, "look at it"),
    )


IDLE = (("start", 10), ("stopped", 10, "SIGTERM"))


@pytest.mark.parametrize(
    "launch",
    [
        [("start", 10), ("commit", 11)],
        [("start", 10), ("finished", 10)],
        [("start", 10), ("rewind", 5)],
        [("start", 10), ("halted", 10, WALLTIME), ("stopped", 10, "was halted: a human let it go on")],
    ],
    ids=["commit", "finished", "rewind", "released"],
)
def test_the_row_begins_again(launch: list[tuple[Any, ...]]) -> None:
    assert generations(*IDLE, *launch) == []
    assert generations(*IDLE, *launch, *IDLE, *IDLE) == [3, 4]


def test_a_commit_without_an_entry_is_known_by_the_next_start() -> None:
    assert generations(*IDLE, ("start", 10), ("start", 20)) == [3]
    assert generations(*IDLE, resumes_from=10) == [1]
    assert generations(*IDLE, resumes_from=20) == []


def test_a_launch_that_resumes_from_an_earlier_step_is_no_progress() -> None:
    assert generations(*IDLE, ("start", 5), ("commit", 5), resumes_from=5) == [1, 2]


def test_a_launch_that_runs_has_not_ended() -> None:
    assert generations(*IDLE, ("start", 10), is_running=True) == [1]
    assert generations(*IDLE, ("start", 10), ("commit", 11), is_running=True) == []
    assert generations(*IDLE, ("start", 10)) == [1, 2]
    assert wasted_launches([], is_running=True) == ()


def test_entries_of_an_older_journal_may_lack_what_is_not_needed() -> None:
    older = [{"time": 1.0, "event": "start"}, {"time": 2.0, "event": "stopped"}]
    assert wasted_launches(older) == (WastedLaunch(0, 0, STOPPED, 0, ""),)


def test_a_launch_says_how_it_ended() -> None:
    said = str(WastedLaunch(3, 10, FAILED, 12, "OutOfMemoryError: CUDA out of memory.\nTried to allocate"))
    assert said == "start 3 failed at step 12 (OutOfMemoryError: CUDA out of memory.)"
    assert str(WastedLaunch(2, 10, KILLED)) == "start 2 was killed"


@pytest.mark.parametrize(
    ("ended", "reason", "walltime", "memory"),
    [
        (STOPPED, WALLTIME, True, False),
        (STOPPED, "SIGUSR1", True, False),
        (STOPPED, "SIGTERM", False, False),
        (HALTED, WALLTIME, False, False),
        (FAILED, "MemoryError: ", False, True),
        (FAILED, "RuntimeError: [enforce fail] DefaultCPUAllocator: not enough memory", False, True),
        (FAILED, "ValueError: shape", False, False),
        (STOPPED, "out of memory", False, False),
    ],
)
def test_walltime_and_memory_are_told_apart(ended: RunState, reason: str, walltime: bool, memory: bool) -> None:
    launch = WastedLaunch(1, 0, ended, 0, reason)
    assert (launch.left_for_walltime, launch.ran_out_of_memory) == (walltime, memory)
