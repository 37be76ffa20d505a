"""Launches that end before they keep a step: counted, and halted where the time limit can never be long enough."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from resume_adapters.core.run_directory.status import RunState
from resume_adapters.core.stop.policy import WALLTIME, StopOn
from resume_adapters.core.stop.processes import start_time
from resume_adapters.errors import Halted, RunHalted, Stopped

from launch import Server
from miniature import Miniature

JOB = Path(__file__).parents[1] / "job.py"
STARTED_UP, LIMIT = 22.0, 60.0


def leave(directory: Path, reason: str = WALLTIME, *, keeps: int | None = None, **options: Any) -> Stopped:
    """Start, end a step if one is to be kept, and leave, 22 seconds after the process began."""
    began = start_time(os.getpid()) or time.time()
    job = Miniature(directory, stop=StopOn(**options), clock=lambda: began + STARTED_UP)
    job.run.begin(job.step, 0.0)
    job.run.flag.request(reason)
    if keeps is not None:
        job.run.steps.end_step(keeps, 0.1)
        job.commit(keeps)
    with pytest.raises(Stopped) as left:
        job.run.leave(job.step if keeps is None else keeps, 0.0)
    return left.value


def release(directory: Path) -> None:
    """Let a halted run go on, as ``resume-adapters stop --undo`` does."""
    job = json.loads((directory / ".resume" / "status.json").read_bytes())
    job["state"] = "stopped"
    (directory / ".resume" / "status.json").write_text(json.dumps(job))
    line = {"time": 1.0, "event": "stopped", "step": job.get("step", 0), "reason": "a human let it go on"}
    with (directory / ".resume" / "journal.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def state(directory: Path) -> tuple[str, str]:
    status = json.loads((directory / ".resume" / "status.json").read_bytes())
    return status["state"], status["reason"]


@pytest.fixture
def queued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Slurm job; the file has a line for each time that it was queued again."""
    (tmp_path / "bin").mkdir()
    asked = tmp_path / "asked"
    asked.touch()
    (tmp_path / "bin" / "scontrol").write_text(f"#!/bin/sh\necho $@ >> {asked}\n")
    (tmp_path / "bin" / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    return asked


@pytest.mark.parametrize("reason", [WALLTIME, "SIGUSR1"])
def test_the_second_launch_without_time_for_a_step_halts_and_is_not_queued_again(
    tmp_path: Path, queued: Path, reason: str
) -> None:
    run, options = tmp_path / "run", {"requeue": "slurm", "walltime": LIMIT}
    assert not isinstance(leave(run, reason, **options), Halted)
    assert queued.read_text() == "requeue 4711\n"
    left = leave(run, reason, **options)
    assert isinstance(left, Halted)
    assert left.code == 3
    assert left.reason == (
        "2 launches in a row left for the walltime before they kept a step: time limit 60 s, start-up more than 22 s, "
        "reserve 60 s: ask for at least 2 minutes"
    )
    assert state(run) == ("halted", left.reason)
    assert queued.read_text() == "requeue 4711\n", "it would come back for ever"
    with pytest.raises(RunHalted, match="ask for at least 2 minutes"):
        Miniature(run)


def test_a_released_run_has_two_launches_again(tmp_path: Path) -> None:
    leave(tmp_path)
    assert isinstance(leave(tmp_path), Halted)
    release(tmp_path)
    assert not isinstance(leave(tmp_path), Halted)
    assert isinstance(leave(tmp_path), Halted)


def test_a_launch_that_is_preempted_is_only_counted(tmp_path: Path) -> None:
    for number in range(4):
        assert not isinstance(leave(tmp_path, "SIGTERM"), Halted)
        assert len(Miniature(tmp_path).run.wasted) == 2 * number + 1, "the one that is asked was killed"


@pytest.mark.parametrize("between", ["SIGTERM", None])
def test_launches_for_the_walltime_that_are_not_in_a_row_do_not_halt(tmp_path: Path, between: str | None) -> None:
    leave(tmp_path)
    if between is None:
        leave(tmp_path, keeps=5)
    else:
        leave(tmp_path, between)
    assert not isinstance(leave(tmp_path), Halted)


def test_a_launch_that_keeps_a_step_does_not_halt(tmp_path: Path) -> None:
    leave(tmp_path)
    assert not isinstance(leave(tmp_path, keeps=1), Halted)
    assert Miniature(tmp_path).run.wasted == ()


def test_a_save_of_the_step_that_it_resumed_from_is_no_progress(tmp_path: Path) -> None:
    leave(tmp_path, keeps=5)
    leave(tmp_path, keeps=5)
    left = leave(tmp_path, keeps=5)
    assert isinstance(left, Halted)
    assert "start-up 22 s" in left.reason, "a step was done"


def test_without_a_known_walltime_the_figures_are_what_is_known(tmp_path: Path) -> None:
    leave(tmp_path, "SIGUSR2")
    assert "before they kept a step: start-up more than 22 s, reserve 60 s" in leave(tmp_path, "SIGUSR2").reason


def test_a_halt_of_the_script_keeps_its_reason(tmp_path: Path) -> None:
    leave(tmp_path)
    job = Miniature(tmp_path)
    job.run.begin(0, 0.0)
    job.run.flag.request(WALLTIME)
    job.run.flag.halt("the loss is not finite")
    with pytest.raises(Halted) as left:
        job.run.leave(0, 0.0)
    assert left.value.reason == "the loss is not finite"


def test_a_start_knows_how_the_launches_before_it_ended(tmp_path: Path) -> None:
    Miniature(tmp_path).commit(10)
    Miniature(tmp_path)
    failing = Miniature(tmp_path)
    failing.run.set_state(RunState.FAILED, step=12, reason="OutOfMemoryError: CUDA out of memory")
    leave(tmp_path)
    assert [str(launch) for launch in Miniature(tmp_path).run.wasted] == [
        "start 2 was killed",
        "start 3 failed at step 12 (OutOfMemoryError: CUDA out of memory)",
        "start 4 stopped at step 10 (the walltime is nearly over)",
    ]


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
def test_all_ranks_halt_alike_though_one_knows_of_the_walltime(server: Server, tmp_path: Path, own: bool) -> None:
    """They share a run directory, or are two nodes that have their own, of which the second's journal is gone."""
    for launch in range(2):
        words = ["run_short", str(tmp_path / "run"), json.dumps(own)]
        server.start(JOB, words, tmp_path, 2, {}, nodes=2).wait().require_success()
        results = [json.loads((tmp_path / f"result.{rank}").read_text()) for rank in range(2)]
        assert results[0] == results[1]
        assert results[0]["left"] == ("Halted" if launch else "Stopped")
        assert ("time limit 0 s" in results[1]["reason"]) == bool(launch)
        if own:
            (tmp_path / "run" / "1" / ".resume" / "journal.jsonl").unlink()


def test_a_start_notes_how_far_a_launch_had_come_that_was_killed(tmp_path: Path) -> None:
    killed = Miniature(tmp_path)
    killed.run.begin(0, 0.0)
    killed.run.steps.end_step(7, 0.1)
    killed.run.set_state(RunState.RUNNING)
    killed.run.close()
    leave(tmp_path)
    Miniature(tmp_path)
    lines = (tmp_path / ".resume" / "journal.jsonl").read_text().splitlines()
    starts = [entry for entry in map(json.loads, lines) if entry["event"] == "start"]
    seen = [each["former"] and {name: each["former"][name] for name in ("generation", "step")} for each in starts]
    assert seen == [None, {"generation": 1, "step": 7}, None]
