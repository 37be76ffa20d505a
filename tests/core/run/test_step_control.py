"""A run from its first step to its last: when it saves, what asks it to stop, and what it says of itself."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from resume_adapters.core.run import monitor, step_control
from resume_adapters.core.run_directory.control import StopFile
from resume_adapters.core.run_directory.status import RunState
from resume_adapters.core.saving.cadence import Cadence
from resume_adapters.core.stop.policy import StopOn
from resume_adapters.core.stop.processes import start_time
from resume_adapters.core.stop.walltime import VARIABLE
from resume_adapters.errors import FencedOff, Halted, RunHalted, Stopped
from waiting import until

from faults import Disturbed, refuse
from launch import Server
from miniature import Miniature

JOB = Path(__file__).parents[1] / "job.py"
SECOND = 0.05
"""What the monitor takes for a second here."""


@pytest.fixture(autouse=True)
def short_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "_PERIOD", SECOND)
    monkeypatch.setattr(step_control, "_LOOK_EVERY", SECOND)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Miniature]]:
    """Open the run directory and begin; every run is closed in the end."""
    made: list[Miniature] = []

    def begin(**options: Any) -> Miniature:
        job = Miniature(tmp_path, **options)
        made.append(job)
        job.run.begin(job.step, 0.0)
        return job

    yield begin
    for job in made:
        job.run.close()


def until_asked(job: Miniature, step: int = 1, timeout: float = 120.0) -> None:
    deadline = time.monotonic() + timeout
    while not job.run.steps.end_step(step, 0.1).stop:
        assert time.monotonic() < deadline, "nothing asked the run to stop"
        time.sleep(0.01)


def status(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / ".resume" / "status.json").read_bytes())
    return found


# ---- What asks for a stop


def test_the_stop_file_stops_and_goes(make: Callable[..., Miniature], tmp_path: Path) -> None:
    job = make()
    file = tmp_path / ".resume" / "stop"
    file.touch()
    until_asked(job)
    with pytest.raises(Stopped):
        job.run.leave(1, 0.1)
    assert not file.exists(), "the next launch would stop at once"
    assert status(tmp_path)["reason"] == "stop in .resume"


def test_a_stop_file_of_an_earlier_start_means_nothing(make: Callable[..., Miniature], tmp_path: Path) -> None:
    (tmp_path / ".resume").mkdir()
    (tmp_path / ".resume" / "stop").touch()
    job = make()
    time.sleep(3 * SECOND)
    assert not job.run.steps.end_step(1, 0.1).stop


def test_a_walltime_stops_in_time(make: Callable[..., Miniature], tmp_path: Path) -> None:
    clock = [time.time()]
    job = make(stop=StopOn(walltime=timedelta(days=1)), clock=lambda: clock[0])
    job.run.steps.end_step(1, 0.1)
    job.commit(1)
    end = (start_time(os.getpid()) or clock[0]) + 24 * 3600
    clock[0] = end - 120
    time.sleep(3 * SECOND)
    assert not job.run.steps.end_step(2, 0.2).stop, "a quick run does not leave two minutes early"
    clock[0] = end - 5
    until_asked(job, 3)
    with pytest.raises(Stopped) as left:
        job.run.leave(3, 0.3)
    assert left.value.reason == "the walltime is nearly over"


def test_a_walltime_from_the_environment(
    make: Callable[..., Miniature], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    job = make()
    until_asked(job)
    assert status(tmp_path)["ends"] < time.time() + 1


@pytest.mark.parametrize("reserve", ["auto", "2:00:00"])
def test_a_launch_does_a_step_before_it_leaves_for_a_walltime_that_is_shorter_than_the_reserve(
    make: Callable[..., Miniature], reserve: str
) -> None:
    now = time.time()
    walltime = now - (start_time(os.getpid()) or now) + 50
    job = make(stop=StopOn(walltime=walltime, reserve=reserve), clock=lambda: now)
    time.sleep(3 * SECOND)
    job.run.skip_batch()
    job.run.end_skipping()
    assert not job.run.steps.should_stop(), "not in an evaluation before the first step either"
    assert not job.run.steps.end_step(1, 0.1).stop
    until_asked(job, 2)
    job.commit(2)
    with pytest.raises(Stopped) as left:
        job.run.leave(2, 0.2)
    assert left.value.reason == "the walltime is nearly over"


def test_a_launch_that_has_no_time_for_the_slowest_save_leaves_before_its_first_step(
    make: Callable[..., Miniature], tmp_path: Path
) -> None:
    (tmp_path / ".resume").mkdir()
    line = {"time": 1.0, "event": "commit", "step": 1, "seconds": 55.0}
    (tmp_path / ".resume" / "journal.jsonl").write_text(json.dumps(line) + "\n")
    now = time.time()
    job = make(stop=StopOn(walltime=now - (start_time(os.getpid()) or now) + 50), clock=lambda: now)
    until(lambda: job.run.flag.reason)
    with pytest.raises(Stopped):
        job.run.end_skipping()


def test_a_later_start_wins_and_the_earlier_one_stops(make: Callable[..., Miniature], tmp_path: Path) -> None:
    earlier = make()
    earlier.commit(10)
    later = make()
    until_asked(earlier, 11)
    assert earlier.run.flag.reason is not None
    assert earlier.run.flag.reason.startswith("start 2 (process ")
    with pytest.raises(FencedOff, match=r"start 2 \(process \d+ on "):
        earlier.commit(11)
    later.commit(12)
    assert later.committed() == {"checkpoint-10": 10, "checkpoint-12": 12}


def test_an_earlier_start_that_leaves_takes_back_no_stop_of_a_later_one(
    make: Callable[..., Miniature], tmp_path: Path
) -> None:
    earlier = make()
    later = make()
    until(lambda: earlier.run.flag.reason)
    later.run.steps.close()  # it has not looked yet
    later.run.control.stop_file.request("resume-adapters stop")
    with pytest.raises(Stopped):
        earlier.run.leave(0, 0.0)
    assert later.run.control.stop_file.reason() == "resume-adapters stop"
    assert (status(tmp_path)["state"], status(tmp_path)["generation"]) == ("running", 2)


def test_an_earlier_start_that_skips_data_stops_no_later_one(make: Callable[..., Miniature]) -> None:
    earlier = make()
    later = make()
    until(lambda: earlier.run.flag.reason)
    asked = []
    earlier.run.control.stop_file.request = asked.append  # type: ignore[method-assign]
    with pytest.raises(Stopped):
        earlier.run.skip_batch()
    assert not asked and later.run.flag.reason is None


# ---- Halting


def test_a_halted_run_does_not_start_again(make: Callable[..., Miniature], tmp_path: Path) -> None:
    job = make(stop=StopOn(exit_code=85))
    job.commit(10)
    job.run.flag.halt("the loss is not finite")
    assert job.run.steps.end_step(11, 1.1).stop
    job.commit(11)
    with pytest.raises(Halted) as left:
        job.run.leave(11, 1.1)
    assert left.value.code == 3, "a supervisor that resubmits on 85 must not"
    assert (status(tmp_path)["state"], status(tmp_path)["reason"]) == ("halted", "the loss is not finite")
    before = sorted(tmp_path.rglob("*"))
    for resume in ("auto", "scratch!"):
        with pytest.raises(RunHalted, match=r"halted at step 11: the loss is not finite.*resume-adapters stop --undo"):
            Miniature(tmp_path, resume=resume)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_halt_counts_for_more_than_a_stop(make: Callable[..., Miniature], tmp_path: Path) -> None:
    job = make()
    job.run.flag.request("SIGTERM")
    job.run.flag.halt("look at it")
    with pytest.raises(Halted):
        job.run.leave(1, 0.1)
    assert status(tmp_path)["reason"] == "look at it"


# ---- When it saves


def test_steps_decide(make: Callable[..., Miniature]) -> None:
    job = make(cadence=Cadence(4))
    assert [step for step in range(1, 13) if job.run.steps.end_step(step, 0.0).save] == [4, 8, 12]


def test_without_a_cadence_the_framework_decides(make: Callable[..., Miniature]) -> None:
    job = make()
    assert not any(job.run.steps.end_step(step, 0.0).save for step in range(1, 13))


def test_a_time_decides_and_every_save_counts(make: Callable[..., Miniature]) -> None:
    cadence = Cadence(timedelta(hours=1))
    job = make(cadence=cadence)
    assert not job.run.steps.end_step(1, 0.0).save
    cadence.start(time.monotonic() - 3601)
    assert job.run.steps.end_step(2, 0.0).save
    job.commit(2)
    assert not job.run.steps.end_step(3, 0.0).save
    cadence.start(time.monotonic() - 3601)
    job.commit(4)
    assert not job.run.steps.end_step(5, 0.0).save


# ---- What it says


def test_the_status_is_live(make: Callable[..., Miniature], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = int(time.time()) + 7200
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(ends))
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    period = 0.25
    monkeypatch.setattr(monitor, "_PERIOD", period)
    began = time.time()
    job = make(cadence=Cadence(50))
    seen, step = {status(tmp_path)["updated"]}, 0
    while len(seen) < 3:
        step += 1
        job.run.steps.end_step(step, step / 100, 1000)
        seen.add(status(tmp_path)["updated"])
        time.sleep(0.01)
        assert time.time() - began < 120
    found = status(tmp_path)
    assert time.time() - began >= 2 * period, "once a second, which is shorter here"
    assert (found["state"], found["horizon"], found["generation"], found["job"]) == ("running", 1000, 1, "4711")
    assert found["pid"] == os.getpid()
    assert step - 150 < found["step"] <= step
    assert found["epoch"] == found["step"] / 100
    assert found["next_save"] == (found["step"] // 50 + 1) * 50
    assert 0 < found["rate"] <= 100 + 1 / period, "one step in ten milliseconds, and one more at an end of a period"
    assert found["eta"] == pytest.approx(found["updated"] + (1000 - found["step"]) / found["rate"], abs=1)
    assert found["ends"] == ends
    job.run.set_state(RunState.FINISHED, step=step, epoch=1.0, result={"loss": 0.5})
    time.sleep(2 * period)
    found = status(tmp_path)
    assert (found["state"], found["result"]) == ("finished", {"loss": 0.5}), "the monitor does not write over it"


def test_a_disk_that_fails_does_not_end_the_monitor(
    make: Callable[..., Miniature], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(operation: str, path: Path) -> None:
        if operation == "write" and "status.json" in path.name:
            refuse(errno.ENOSPC, path)

    storage = Disturbed()
    job = make(storage=storage)
    storage.before = fail
    until(lambda: "could not refresh the status" in caplog.text)
    storage.before = lambda operation, path: None
    job.run.steps.end_step(7, 0.7)
    until(lambda: status(tmp_path).get("step") == 7)


class Stale(Disturbed):
    """A network disk on which one file cannot be read for a while."""

    def __init__(self) -> None:
        super().__init__(lambda operation, path: (operation, path.name) == ("read", self.name) and refuse(errno.ESTALE))
        self.name = ""


@pytest.mark.parametrize("asks", ["walltime", "stop file"])
@pytest.mark.parametrize("name", ["stop", "generation"])
def test_a_disk_that_recovers_still_asks_for_a_stop(
    make: Callable[..., Miniature], tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, asks: str
) -> None:
    storage, clock = Stale(), [time.time()]
    job = make(storage=storage, stop=StopOn(walltime=timedelta(days=1)), clock=lambda: clock[0])

    def warnings() -> list[str]:
        return [record.message for record in caplog.records if record.levelname == "WARNING"]

    storage.name = name
    until(lambda: bool(warnings()))
    time.sleep(3 * SECOND)
    assert not job.run.steps.end_step(1, 0.1).stop
    storage.name = ""
    time.sleep(2 * SECOND)
    assert len(warnings()) == 1, "once, not every second"
    assert os.strerror(errno.ESTALE) in warnings()[0]
    if asks == "walltime":
        clock[0] += 24 * 3600
    else:
        job.run.control.stop_file.request("enough")
    until_asked(job, 2)
    assert job.run.flag.reason == ("enough" if asks == "stop file" else "the walltime is nearly over")


# ---- While skipping through data


def test_a_disk_that_fails_while_skipping_does_not_end_the_run(make: Callable[..., Miniature], tmp_path: Path) -> None:
    storage = Stale()
    job = make(storage=storage)
    storage.name = "stop"
    job.run.skip_batch()
    storage.name = ""
    job.run.control.stop_file.request("enough")
    time.sleep(2 * SECOND)
    with pytest.raises(Stopped) as left:
        job.run.skip_batch()
    assert left.value.reason == "enough"


def test_a_stop_while_skipping_leaves_without_a_save(make: Callable[..., Miniature], tmp_path: Path) -> None:
    first = make()
    first.commit(10)
    first.run.close()  # else its monitor may be about to write its status, and do so when the second has stopped
    job = make()
    job.run.skip_batch()
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(Stopped):
        job.run.skip_batch()
    found = status(tmp_path)
    assert (found["state"], found["step"], found["reason"]) == ("stopped", 10, "SIGTERM")
    assert not (tmp_path / ".resume" / "stop").exists()
    assert job.committed() == {"checkpoint-10": 10}


@pytest.mark.parametrize("asked", [0, 1])
def test_a_rank_that_is_asked_while_skipping_takes_the_others_along(server: Server, tmp_path: Path, asked: int) -> None:
    """The other would read on for minutes; it hears within seconds."""
    server.start(JOB, ["skip", str(tmp_path / "run"), str(asked)], tmp_path, 2, {}).wait().require_success()
    results = [json.loads((tmp_path / f"result.{rank}").read_text()) for rank in range(2)]
    assert [result["left"] for result in results] == ["SIGTERM", "SIGTERM"]
    assert min(result["skipped"] for result in results) < 100


@pytest.mark.parametrize("saved", [None, 12])
def test_all_ranks_save_by_the_clock_of_rank_zero(server: Server, tmp_path: Path, saved: int | None) -> None:
    """Rank zero finds a save due after step 10, all are told after 11; a save in between makes it void."""
    words = ["clock", str(tmp_path / "run"), json.dumps(saved)]
    server.start(JOB, words, tmp_path, 2, {}).wait().require_success()
    results = [json.loads((tmp_path / f"result.{rank}").read_text())["saves"] for rank in range(2)]
    assert results[0] == results[1] == ([11] if saved is None else [])


# ---- What a step costs


def test_a_process_that_ends_without_a_word_is_not_held_up(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from miniature import Miniature\n"
        "Miniature(Path(sys.argv[1])).run.begin(0, 0.0)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", program, tmp_path], check=True, timeout=240, env=environment)


def test_what_stands_in_the_way_of_reading_is_no_word(make: Callable[..., Miniature], tmp_path: Path) -> None:
    """A directory of that name asks for no stop, and is in no launch's way; an entry without an event is ignored."""
    job = make()
    control = tmp_path / ".resume"
    (control / "stop").mkdir()
    assert job.run.control.stop_file.reason() is None
    job.run.control.stop_file.withdraw()
    before = list(job.run.control.journal.history())
    with (control / "journal.jsonl").open("a") as file:
        file.write('{"time": 1}\n{"event": "start"}\n[]\n')
    assert list(job.run.control.journal.history()) == before
    (control / "journal.jsonl").unlink()
    assert list(job.run.control.journal.history()) == []


def test_an_error_of_looking_is_no_answer(tmp_path: Path) -> None:
    """A server that denies everything for a moment asks for no stop; a stop file that may not be read does."""
    file = tmp_path / "stop"
    denied = Disturbed(lambda operation, path: path == file and refuse(errno.EACCES, path))
    assert StopFile(denied, tmp_path).reason() is None
    with pytest.raises(PermissionError):
        StopFile(Disturbed(lambda operation, path: refuse(errno.EACCES, path)), tmp_path).reason()
    file.touch()
    assert StopFile(denied, tmp_path).reason() == f"stop in {tmp_path.name}"


def test_a_launcher_that_is_gone_stops_the_run(make: Callable[..., Miniature], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_control, "find_launchers", lambda: lambda: False)
    job = make()
    until_asked(job)
    assert job.run.flag.reason == "the launcher of this process is gone"
    assert job.run.steps.should_stop()
