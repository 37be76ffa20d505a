"""What a status says is what is on disk, whatever ends a launch, and whenever: a table of requests and moments."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from resume_adapters.core.run_directory.control import ControlDirectory
from resume_adapters.core.run_directory.status import RunState, RunStatus, observed_state
from resume_adapters.core.storage.local import LocalStorage

from launch import Outcome, Server
from miniature import committed
from plain_torch import Launch

JOB = Path(__file__).with_name("moments.py")

LAST = 18

BEFORE = ("before the package is imported", "before the run is opened", "while it takes the directory over")
"""Nothing is heard yet: a signal ends the process, and a stop file is taken for one that an earlier start has left."""

CHOOSING = "before it says that it runs"
"""It has taken the directory over. A signal ends the process still, and a stop file is for this start."""

BEFORE_A_STEP = ("before it begins", "while data are skipped")
"""There is nothing to save."""

TRAINING = (
    "in the first step",
    "in a step",
    "while a checkpoint is written",
    "while it is committed",
    "behind its commit",
    "in an evaluation",
    "between two epochs",
    "in the last step",
)
"""A request is answered at the end of a step."""

ENDING = (
    "while the last one is written",
    "while the last one is committed",
    "before it says that it has finished",
)
"""Nothing is left to stop: the run finishes."""

AFTER = "after the training"

REQUESTS = ("SIGTERM", "stop file", "SIGTERM SIGTERM", "SIGTERM SIGINT")

USUAL = {
    "SIGTERM": (*BEFORE, CHOOSING, *BEFORE_A_STEP, *TRAINING, *ENDING, AFTER),
    "stop file": (BEFORE[0], CHOOSING, *BEFORE_A_STEP, "in the first step", ENDING[0], AFTER),
    "SIGTERM SIGINT": ("in the first step", ENDING[0]),
    "SIGINT SIGINT": (BEFORE_A_STEP[0], "in a step", ENDING[0]),
    "SIGKILL": (BEFORE[2], "in the first step", "while it is committed", ENDING[1], ENDING[2], AFTER),
}
"""The rows of the table that are not left to ``thorough``."""


def rows(*asked: str) -> list[Any]:
    """Return the rows of the table for what a launch is asked."""
    moments = (*BEFORE, CHOOSING, *BEFORE_A_STEP, *TRAINING, *ENDING, AFTER)
    return [
        pytest.param(ask, moment, marks=() if moment in USUAL.get(ask, ()) else pytest.mark.thorough)
        for ask in asked
        for moment in moments
    ]


Start = Callable[..., Outcome]


@pytest.fixture
def start(server: Server, tmp_path: Path) -> Start:
    """Launch the job, to which something is done at a moment; one that skips data has been killed before."""

    def launch(moment: str = "never", ask: str = "") -> Outcome:
        words = [json.dumps({"moment": moment, "asks": ask.split(" ") if ask != "stop file" else [ask]})]
        return server.start(JOB, words, tmp_path, 1, {}).wait()

    def begin(moment: str = "never", ask: str = "") -> Outcome:
        if moment == "while data are skipped":
            assert launch("in a step", "SIGKILL").killed
        return launch(moment, ask)

    return begin


def read(directory: Path) -> tuple[RunState, RunStatus | None]:
    """Return the state of a run whose process is dead, and its status, once that agrees with what is on disk."""
    status = ControlDirectory(LocalStorage(), directory, time.time).status.read()
    state, newest = observed_state(status), max(committed(directory).values(), default=None)
    assert state is not RunState.RUNNING, "its process is dead"
    if status is not None:
        assert (status.step == LAST) if state is RunState.FINISHED else status.step <= LAST
        if state in (RunState.STOPPED, RunState.FINISHED):
            assert (status.step, status.last_commit) == (newest or 0, newest)
    return state, status


def require_resumed(start: Start, directory: Path) -> None:
    """The same launch goes on from the newest checkpoint to the end, or says that it has finished."""
    newest = max(committed(directory).values(), default=0)
    state = read(directory)[0]
    output = start().require_success().output
    assert ("finished at step" in output) == (state is RunState.FINISHED), output
    assert (f"Resuming from checkpoint-{newest}." in output) == (newest > 0), output
    assert read(directory)[0] is RunState.FINISHED
    assert not (directory / ".resume" / "stop").exists()


@pytest.mark.parametrize(("ask", "moment"), rows(*REQUESTS))
def test_a_request_to_stop(start: Start, tmp_path: Path, ask: str, moment: str) -> None:
    outcome, directory = start(moment, ask), tmp_path / "run"
    is_heard = moment in (*BEFORE_A_STEP, *TRAINING, *ENDING)
    is_for_it = is_heard or (moment == CHOOSING and ask == "stop file")
    state, status = read(directory)
    if is_for_it and moment not in ENDING:
        assert (state, outcome.statuses) == (RunState.STOPPED, (0,)), outcome.output
        assert status is not None and status.reason in (*ask.split(" "), "resume-adapters stop")
    elif moment in (*ENDING, AFTER) or ask == "stop file":
        assert state is RunState.FINISHED
    else:
        assert state is RunState.UNKNOWN, "it has not begun"
    assert outcome.statuses == ((0,) if is_heard or ask == "stop file" else (-signal.SIGTERM,))
    require_resumed(start, directory)


@pytest.mark.parametrize(("ask", "moment"), rows("SIGINT SIGINT"))
def test_a_second_interrupt(start: Start, tmp_path: Path, ask: str, moment: str) -> None:
    """It leaves at once; of two that come before Python looks, it sees one."""
    outcome, directory = start(moment, ask), tmp_path / "run"
    state, status = read(directory)
    if outcome.statuses == (0,):
        assert state is (RunState.STOPPED if moment in TRAINING else RunState.FINISHED), outcome.output
    elif moment in (*BEFORE, CHOOSING, AFTER):
        assert state is (RunState.FINISHED if moment == AFTER else RunState.UNKNOWN)
    elif moment == ENDING[2]:
        assert state is RunState.KILLED, "it was cut off within its last word"
    else:
        assert state is RunState.FAILED
        assert status is not None and status.reason.startswith("KeyboardInterrupt: second SIGINT"), status
    require_resumed(start, directory)


@pytest.mark.parametrize(("ask", "moment"), rows("SIGKILL"))
def test_a_kill(start: Start, tmp_path: Path, ask: str, moment: str) -> None:
    outcome, directory = start(moment, ask), tmp_path / "run"
    assert outcome.killed
    state, _ = read(directory)
    if moment == AFTER:
        assert state is RunState.FINISHED
    else:
        assert state is (RunState.UNKNOWN if moment in (*BEFORE, CHOOSING) else RunState.KILLED)
    require_resumed(start, directory)


def test_a_request_to_a_start_that_a_later_one_has_replaced(server: Server, start: Start, tmp_path: Path) -> None:
    """It commits nothing more, and the status stays that of the later one."""
    words = [json.dumps({"moment": "in a step", "asks": ["SIGSTOP", "SIGTERM"]})]
    earlier = server.start(JOB, words, tmp_path, 1, {})
    try:
        earlier.wait_until_stopped()
        start().require_success()
        before = (tmp_path / "run" / ".resume" / "status.json").read_bytes()
    finally:
        earlier.signal(signal.SIGCONT)
    outcome = earlier.wait()
    assert outcome.statuses == (1,) and "FencedOff" in outcome.output, outcome.output
    assert (tmp_path / "run" / ".resume" / "status.json").read_bytes() == before
    assert read(tmp_path / "run")[0] is RunState.FINISHED


def test_a_rank_that_halts_behind_its_last_step_halts_all(server: Server, tmp_path: Path) -> None:
    server.start(JOB.parents[1] / "job.py", ["halt_last", "run"], tmp_path, 2, {}).wait().require_success()
    for rank in range(2):
        found = json.loads((tmp_path / f"result.{rank}").read_text())
        assert found == {"left": "Halted", "reason": "look at the loss"}
    state, status = read(tmp_path / "run")
    assert status is not None and (state, status.step) == (RunState.HALTED, max(committed(tmp_path / "run").values()))


@pytest.mark.parametrize(
    ("error", "reason"),
    [(KeyboardInterrupt(), "KeyboardInterrupt"), (SystemExit("no more"), "SystemExit: no more")],
    ids=["interrupted", "exit"],
)
def test_a_process_that_goes_on_without_the_training_does_not_run_it(
    tmp_path: Path, error: BaseException, reason: str
) -> None:
    """In a notebook, or in a script that catches what ended the training."""

    def leave(launch: Launch) -> None:
        if launch.loop.global_step == 6:
            raise error

    with pytest.raises(type(error)):
        Launch(tmp_path, leave)()
    status = json.loads((tmp_path / ".resume" / "status.json").read_bytes())
    assert (status["state"], status["step"], status["reason"]) == ("failed", 6, reason)
    assert status["last_commit"] == 4
