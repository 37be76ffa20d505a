"""The lines of a watched run, and the points at which it stops itself."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from resume_adapters.core.storage.local import LocalStorage
from resume_adapters.core.trace.log import open_trace
from resume_adapters.core.trace.points import points_of_rank
from resume_adapters.errors import UnsupportedSetting

from launch import Server


def opened(**environment: str) -> Any:
    return open_trace(environment, 0, clock=time.time, uncounted="monitor")


def test_without_the_variables_there_is_no_trace() -> None:
    assert opened() is None


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RESUME_ADAPTERS_PAUSE": "step:3"}, "RESUME_ADAPTERS_TRACE is not"),
        ({"RESUME_ADAPTERS_TRACE": "t", "RESUME_ADAPTERS_TRACE_EVERY": "0"}, "expected a positive number of steps"),
        ({"RESUME_ADAPTERS_TRACE": "t", "RESUME_ADAPTERS_TRACE_EVERY": "x"}, "expected a positive number of steps"),
        ({"RESUME_ADAPTERS_TRACE": "t", "RESUME_ADAPTERS_PAUSE": "save:3"}, "holds 'save:3'; expected step:N"),
        ({"RESUME_ADAPTERS_TRACE": "t", "RESUME_ADAPTERS_PAUSE": "save:3:0"}, "holds 'save:3:0'"),
    ],
)
def test_a_variable_that_cannot_be_understood_is_refused(environment: dict[str, str], words: str) -> None:
    with pytest.raises(UnsupportedSetting, match=words):
        opened(**environment)


def test_a_point_is_for_its_rank_or_for_all() -> None:
    given = "step:3 step:4@1 save:5:2 save:6:2@1  prune:7:1"
    found = {rank: [each.text for each in points_of_rank(given, rank)] for rank in (0, 1, 2)}
    assert found == {0: ["step:3", "save:5:2", "prune:7:1"], 1: ["step:3", "step:4@1", "save:6:2@1"], 2: ["step:3"]}


# ---- Pause points, in a process that really stops

JOB = """
from pathlib import Path
from resume_adapters.core.checkpoint.retention import KeepLast
from miniature import Miniature

job = Miniature(Path("run"), keep=KeepLast(1))
job.run.begin(job.step, 0.0)
for step in range(job.step + 1, 7):
    job.run.steps.end_step(step, 0.0)
    job.run.trace.reach(step)
    if step % 2 == 0:
        job.commit(step)
job.run.close()
"""


class Paused:
    """A process that stops itself at points.

    Args:
        server: forks it.
        directory: its working directory.
        points: the points.
    """

    def __init__(self, server: Server, directory: Path, points: str) -> None:
        self.file = directory / "steps"
        script = directory / "job.py"
        script.write_text(JOB)
        environment = {"RESUME_ADAPTERS_TRACE": str(self.file), "RESUME_ADAPTERS_PAUSE": points}
        self.running = server.start(script, [], directory, 1, environment)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.file.read_text().splitlines()] if self.file.exists() else []

    def wait_until_stopped(self, at: str) -> list[dict[str, Any]]:
        """Wait until the process has stopped itself at a point, and return what it had written."""
        (pid,), until = self.running.pids, time.monotonic() + 240
        while not (self.is_announced(at) and psutil.Process(pid).status() == psutil.STATUS_STOPPED):
            assert time.monotonic() < until and self.running.alive(), self.lines()
            time.sleep(0.01)
        lines = self.lines()
        assert lines[-1]["at"] == at, "nothing is written by a process that is stopped"
        return lines

    def is_announced(self, at: str) -> bool:
        return any(line.get("at") == at for line in self.lines())

    def go_on(self) -> None:
        self.running.signal(signal.SIGCONT)


@pytest.fixture
def paused(server: Server, tmp_path: Path) -> Iterator[Any]:
    started: list[Paused] = []

    def start(points: str) -> Paused:
        started.append(Paused(server, tmp_path, points))
        return started[-1]

    yield start
    for each in started:
        each.running.signal(signal.SIGKILL)


def marker(directory: Path, step: int) -> Path:
    return directory / "run" / f"checkpoint-{step}" / "resume" / "manifest.json"


def test_a_process_stops_itself_at_each_point_once(paused: Any, tmp_path: Path) -> None:
    """After a step; within a save, or before its marker where it has fewer operations; within a prune, or after it."""
    job = paused("step:1 save:2:3 save:3:999 prune:3:2 prune:5:999")
    job.wait_until_stopped("step:1")
    job.go_on()
    job.wait_until_stopped("save:2:3")
    assert not marker(tmp_path, 2).exists()
    job.go_on()
    job.wait_until_stopped("save:3:999")
    assert marker(tmp_path, 2).exists() and not marker(tmp_path, 4).exists()
    job.go_on()
    job.wait_until_stopped("prune:3:2")
    assert marker(tmp_path, 4).exists()
    assert not marker(tmp_path, 2).exists(), "it is renamed as a whole by the first operation"
    job.go_on()
    lines = job.wait_until_stopped("prune:5:999")
    assert [each.name for each in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-6"]
    assert [line["step"] for line in lines if line["event"] == "committed"] == [2, 4, 6]
    job.go_on()
    job.running.wait().require_success()
    pruned = [line for line in job.lines() if line["event"] == "prune"]
    assert [line["names"] for line in pruned] == [["checkpoint-2"], ["checkpoint-4"]]
    assert all(line["operations"] > 2 for line in pruned)
    assert all(line["operations"] > 3 for line in job.lines() if line["event"] == "committed")


def test_what_a_thread_of_the_clock_writes_is_not_counted(tmp_path: Path) -> None:
    log = opened(RESUME_ADAPTERS_TRACE=str(tmp_path / "steps"))
    storage = log.counting(LocalStorage())
    storage.write(tmp_path / "before", b"")
    log.begin_save("checkpoint-1", 1)
    storage.write(tmp_path / "counted", b"")
    thread = threading.Thread(target=storage.write, args=(tmp_path / "status", b""), name="monitor")
    thread.start()
    thread.join()
    log.committed()
    with log.pruning({}):
        storage.write(tmp_path / "between", b"")
    committed = json.loads((tmp_path / "steps").read_text().splitlines()[-1])
    assert (committed["event"], committed["step"], committed["operations"]) == ("committed", 1, 1)
