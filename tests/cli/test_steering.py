"""A run is stopped, halted, let go on and taken back from a shell."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import msgspec
import pytest

from resume_adapters.core.run.run import ResumableRun
from resume_adapters.errors import FencedOff, RunHalted

TRAINING = Path(__file__).parent / "training_run.py"


@pytest.fixture
def training(server, run_dir, tmp_path):
    started = server.start(TRAINING, [str(run_dir)], tmp_path, 1, {})
    output = tmp_path / "output.0"
    while not output.exists() or "training" not in output.read_text():
        assert started.alive()
        time.sleep(0.01)
    yield started
    started.signal(signal.SIGKILL)
    while started.alive():
        time.sleep(0.01)


def status(run_dir):
    return json.loads((run_dir / ".resume" / "status.json").read_bytes())


def until(condition, timeout=240.0):
    """Wait until a condition holds, and return what it found."""
    deadline = time.monotonic() + timeout
    while not (found := condition()):
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.01)
    return found


def halt(run_dir):
    found = status(run_dir) | {"state": "halted", "reason": "the loss is not finite", "host": "node-1", "pid": 4711}
    (run_dir / ".resume" / "status.json").write_bytes(msgspec.json.encode(found))


# ---- stop


def test_stop_waits_until_the_run_has_saved_and_left(command, run_dir, training):
    done = command("stop", run_dir, "--wait", "--json")
    assert done.code == 0
    assert (done.json["state"], done.json["reason"], done.json["asked"]) == ("stopped", "resume-adapters stop", True)
    assert training.wait().statuses == (0,)
    assert not (run_dir / ".resume" / "stop").exists()


def test_stop_asks_and_returns(command, run_dir, training):
    assert command("stop", run_dir).code == 0
    assert training.wait().statuses == (0,)
    assert status(run_dir)["state"] == "stopped"


def test_waiting_tells_that_the_run_ended_otherwise(start_command, run_dir, tmp_path, training):
    training.signal(signal.SIGSTOP)
    waiting = start_command(tmp_path / "waiting", "stop", run_dir, "--wait")
    until((run_dir / ".resume" / "stop").exists)
    time.sleep(0.3)
    assert waiting.alive()
    training.signal(signal.SIGKILL)
    assert training.wait().killed
    assert waiting.wait().statuses == (1,)


def test_stop_does_nothing_where_nothing_runs(command, run_dir):
    done = command("stop", run_dir, "--wait", "--json")
    assert (done.code, done.json["state"], done.json["asked"]) == (0, "finished", False)
    assert "Nothing runs in" in command("stop", run_dir).out
    assert not (run_dir / ".resume" / "stop").exists()


def test_the_live_status_is_for_people_too(command, run_dir, training):
    until(lambda: status(run_dir).get("rate"))
    text = command("status", run_dir).out
    for words in ("running: process", "steps/s", "of 100000", "finishes"):
        assert words in text


# ---- stop --undo


def test_a_halted_run_goes_on_when_a_human_says_so(command, run_dir):
    halt(run_dir)
    assert "halted" in command("status", run_dir).out
    with pytest.raises(RunHalted):
        ResumableRun(run_dir).open()
    done = command("stop", "--undo", run_dir, "--json")
    assert done.code == 0
    assert done.json["state"] == "stopped"
    assert "the loss is not finite; a human let it go on" in done.json["reason"]
    assert (done.json["host"], done.json["pid"]) == ("node-1", 4711), "not this command's"
    run = ResumableRun(run_dir)
    assert run.open().checkpoint.step == 30
    run.close()


def test_undoing_leaves_another_run_as_it_is(command, run_dir):
    before = status(run_dir)
    assert command("stop", "--undo", run_dir).code == 0
    assert status(run_dir) == before
    assert command("stop", "--undo", "--wait", run_dir).code == 2


# ---- rewind


def test_rewind_sets_later_checkpoints_aside(command, run_dir):
    done = command("rewind", run_dir, 10, "--json")
    assert done.code == 0
    assert done.json["set_aside"] == {"checkpoint-20": "checkpoint-20.1", "checkpoint-30": "checkpoint-30.1"}
    shelf = run_dir / ".resume" / "set-aside"
    assert (shelf / "checkpoint-30.1" / "resume" / "manifest.json").is_file(), "nothing is deleted"
    assert (run_dir / "latest").resolve().name == "checkpoint-10"
    assert status(run_dir)["state"] == "stopped", "a finished run goes on"
    assert (status(run_dir)["step"], status(run_dir)["epoch"]) == (10, 1.0)
    assert "pid" not in status(run_dir), "the command's process is not the run's"
    assert "process" not in command("status", run_dir).out
    run = ResumableRun(run_dir)
    assert run.open().checkpoint.step == 10
    run.close()


def test_rewind_takes_a_name_too(command, run_dir):
    done = command("rewind", run_dir, "checkpoint-20", "--json")
    assert (done.code, done.json["step"], list(done.json["set_aside"])) == (0, 20, ["checkpoint-30"])


def test_rewind_fences_off_what_still_runs_unnoticed(command, run_dir, make_run):
    run = ResumableRun(run_dir)
    run.open()
    assert command("rewind", run_dir, 20, "--force").code == 0
    with pytest.raises(FencedOff):
        run.pruner.prune(run.storage_group, None)
    run.close()


def test_rewind_refuses_a_running_run(command, run_dir, training):
    done = command("rewind", run_dir, 10)
    assert done.code == 2
    assert "stop it first" in done.err
    assert (run_dir / "checkpoint-30").is_dir()


@pytest.mark.parametrize(
    ("step", "code", "words"),
    [
        (15, 2, "it holds checkpoint-7, checkpoint-10, checkpoint-20, checkpoint-30"),
        (20, 1, "model.bin"),
        ("checkpoint-7", 2, "is foreign; expected a committed checkpoint: checkpoint-10"),
    ],
)
def test_rewind_refuses_a_step_that_cannot_be_resumed_from(command, run_dir, step, code, words, flip):
    flip(run_dir / "checkpoint-20" / "model.bin")
    (run_dir / "checkpoint-7").mkdir()
    done = command("rewind", run_dir, step)
    assert done.code == code
    assert words in done.err
    assert (run_dir / "checkpoint-30").is_dir()


def test_rewind_leaves_a_halted_run_halted(command, run_dir):
    halt(run_dir)
    assert command("rewind", run_dir, 10).code == 0
    assert status(run_dir)["state"] == "halted"
