"""A process of a block dies, or cannot be led out: the others end, and those that are started next are exact."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from selection import often
from waiting import until

from launch import LONG, Server, free_port, search_path
from recovering import after_kills, agent_store, results

JOB = Path(__file__).parent / "job.py"

WITHIN = 40.0
"""Seconds that torchrun gives a process which ignores SIGTERM, and some."""


@pytest.fixture(scope="module")
def whole(server: Server, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    found = results(server, JOB, tmp_path_factory.mktemp("whole"), 2, {"whole": ([], {})})
    return [each["whole"] for each in found]


def require_undisturbed(found: list[dict[str, Any]], whole: list[dict[str, Any]]) -> None:
    for mine, other in zip(found, whole, strict=True):
        assert mine["end"] == other["end"]
        begun = len(other["trace"]) - len(mine["trace"])
        assert mine["trace"] == other["trace"][begun:]


def journal(directory: Path, event: str) -> list[dict[str, Any]]:
    entries = [json.loads(line) for line in (directory / ".resume/journal.jsonl").open()]
    return [each for each in entries if each["event"] == event]


def recoveries(directory: Path) -> list[tuple[Any, ...]]:
    fields = ("level", "rank", "step", "lost", "reason")
    return [tuple(each[name] for name in fields) for each in journal(directory, "recovery")]


def test_ranks_that_die_are_started_again(server: Server, tmp_path: Path, whole: list[dict[str, Any]]) -> None:
    """In a step, in a save, and while the others recover from an exception; an exception before it loses no step."""
    faults = [["forward", 1, 3], ["forward", 0, 6, "kill"], ["save", 1, 10, "kill"], ["data", 0, 16]]
    found = after_kills(server, JOB, tmp_path, 2, [faults, {}])
    require_undisturbed(found, whole)
    assert [each["levels"] for each in found] == [[None, "memory", None, None, "memory"]] * 2
    assert {each[0] for each in recoveries(tmp_path / "killed")} == {"memory"}


def test_a_rank_that_has_not_failed_says_which_one_has(server: Server, tmp_path: Path) -> None:
    found = results(server, JOB, tmp_path, 2, {"given up": ([["forward", 1, 3]], {"max_restarts": 0})})
    assert [each["given up"]["error"] for each in found] == ["PeerFailed", "RuntimeError"]
    assert [each["given up"]["has group"] for each in found] == [False, False], "what was cut cannot be used"
    assert "rank 1 failed after step 3: RuntimeError: forward at 3. The block was" in found[0]["given up"]["message"]


@pytest.mark.thorough
def test_a_process_that_must_end_and_does_not_is_ended(server: Server, tmp_path: Path) -> None:
    """Here the script catches the error; it may also be the interpreter that does not come to its end."""
    case = [[["forward", 1, 3, "kill"]], {"grace": 2.0, "meeting_timeout": 3.0}]
    with agent_store() as environment:
        env = {**environment, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LINGERS": "1"}
        running = server.start(JOB, [json.dumps({"killed": case})], tmp_path, 2, env)
        outcome = running.wait(survivors=WITHIN)
    assert outcome.statuses == (1, -signal.SIGKILL)
    assert "Timeout (0:00:0" in outcome.output


# ---- Under torchrun


class Torchrun:
    """A job under torchrun, on one node."""

    def __init__(self, directory: Path, faults: list[list[Any]], restarts: int = 1, **options: Any) -> None:
        self.directory = directory
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        started = [*command, f"--max-restarts={restarts}", str(JOB), json.dumps({"run": [faults, options]})]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": search_path(), "RAISES": "PeerFailed"}
        with (directory / "output").open("w") as output:
            self.process = subprocess.Popen(started, cwd=directory, env=environment, stdout=output, stderr=output)

    @property
    def output(self) -> str:
        return (self.directory / "output").read_text()

    def wait(self) -> int:
        return self.process.wait(LONG)

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def results(self) -> list[dict[str, Any]]:
        return [json.loads((self.directory / f"result.{rank}").read_text())["run"] for rank in range(2)]

    def starts(self) -> list[float]:
        """Return when each attempt of rank 0 began."""
        return [float(line.split()[1]) for line in (self.directory / "times.0").open()]


@contextlib.contextmanager
def under_torchrun(directory: Path, faults: list[list[Any]], **options: Any) -> Iterator[Torchrun]:
    job = Torchrun(directory, faults, **options)
    try:
        yield job
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            for each in [*job.children(), psutil.Process(job.process.pid)]:
                each.kill()


LIMITS = {"hang_after": 3.0, "grace": 2.0, "meeting_timeout": 8.0}

HANGS = {
    "stopped": [["stop", 1, 8]],
    "rank 0 is stopped": [["stop", 0, 8]],
    "with Python's lock": [["lock", 1, 8]],
    "two with Python's lock": [["lock", 0, 8], ["lock", 1, 8]],
    "in a save": [["stop in a save", 1, 10]],
    "in the update": [["stop in the update", 0, 8]],
}
"""Ranks that cannot be led out of what they do."""


@pytest.mark.parametrize("name", often(HANGS, seldom=HANGS.keys() - {"two with Python's lock"}))
def test_a_rank_that_cannot_be_led_out_is_started_again_with_all_others(
    tmp_path: Path, whole: list[dict[str, Any]], name: str
) -> None:
    """No longer than the limits of the block, and what torchrun gives a process that ignores SIGTERM."""
    with under_torchrun(tmp_path, HANGS[name], **LIMITS) as job:
        assert job.wait() == 0, job.output[-6000:]
        require_undisturbed(job.results(), whole)
        first, second = job.starts()
    assert second - first < sum(LIMITS.values()) + 10 + LIMITS["grace"] + WITHIN + 20, "imports, and ten steps"


LED_OUT = {
    "in an all_reduce": [["all_reduce", 1, 8]],
    "in a loader's worker": [["worker", 0, 8]],
    "in a sleep": [["hang", 1, 8]],
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", [pytest.param(each, marks=pytest.mark.long) for each in LED_OUT])
def test_a_rank_that_hangs_in_what_can_be_left_loses_no_step(
    tmp_path: Path, whole: list[dict[str, Any]], name: str
) -> None:
    with under_torchrun(tmp_path, LED_OUT[name], restarts=0, workers=int("worker" in name), **LIMITS) as job:
        assert job.wait() == 0, job.output[-6000:]
        assert [each["attempts"] for each in job.results()] == [[[0, None], [1, "memory"]]] * 2
        for mine, other in zip(job.results(), whole, strict=True):
            assert mine["end"] == other["end"] or "worker" in name


@pytest.mark.thorough
def test_where_torchrun_is_killed_the_step_is_saved_and_all_processes_end(
    tmp_path: Path, whole: list[dict[str, Any]]
) -> None:
    with under_torchrun(tmp_path, [["wait", 0, 8]]) as job:
        until(lambda: (tmp_path / "waits").exists() or job.process.poll() is not None)
        children = job.children()
        job.process.kill()
        job.wait()
        time.sleep(6.0)  # in which both ranks find it; the vote is read one step later
        (tmp_path / "go on").touch()
        _, alive = psutil.wait_procs(children, WITHIN)
        assert not alive
        assert "Traceback" not in job.output, job.output[-6000:]
        assert job.output.count("sendBytes failed") <= 2, "torch says it once for each rank"
    status = json.loads((tmp_path / "run/.resume/status.json").read_text())
    assert (status["state"], status["reason"]) == ("stopped", "the launcher of this process is gone")
    assert 9 <= journal(tmp_path / "run", "commit")[-1]["step"] < 18
    with under_torchrun(tmp_path, []) as job:
        assert job.wait() == 0, job.output[-6000:]
        require_undisturbed(job.results(), whole)


@pytest.mark.thorough
def test_where_a_rank_fails_once_torchrun_is_gone_all_processes_end_and_say_why(tmp_path: Path) -> None:
    with under_torchrun(tmp_path, [["wait", 0, 8], ["forward", 0, 8]], grace=3.0) as job:
        until(lambda: (tmp_path / "waits").exists() or job.process.poll() is not None)
        children = job.children()
        job.process.kill()
        job.wait()
        (tmp_path / "go on").touch()
        _, alive = psutil.wait_procs(children, WITHIN)
        assert not alive
        assert "PeerFailed: the store of torchrun cannot be reached: torchrun has ended" in job.output


@pytest.mark.thorough
@pytest.mark.long
def test_torchrun_as_it_is(tmp_path: Path, whole: list[dict[str, Any]]) -> None:
    with under_torchrun(tmp_path, [["forward", 0, 7, "kill"], ["data", 1, 12, "kill"]], restarts=2) as job:
        assert job.wait() == 0, job.output[-6000:]
        require_undisturbed(job.results(), whole)
        assert len(job.starts()) == 3


LAUNCHERS = {
    "c10d": ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=test", "--local-addr=127.0.0.1"],
    "static": ["--node-rank={node}", "--master-addr=127.0.0.1", "--master-port={port}"],
}
"""How torchrun brings nodes together. Each has restarts of its own, and counts those of other nodes or not."""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("c10d", "kill"),
        pytest.param("static", "kill", marks=pytest.mark.long),
        # Where the launchers do not tell each other, nobody on that node sees that a process is stopped.
        pytest.param("c10d", "stop", marks=pytest.mark.long),
    ],
)
def test_torchrun_as_it_is_on_two_nodes(tmp_path: Path, whole: list[dict[str, Any]], kind: str, fault: str) -> None:
    """An exception before and after a process has died. They agree which start they are, though the counts differ."""
    ends = ["stop", 1, 7] if fault == "stop" else ["data", 1, 7, "kill"]
    cases = {"killed": [[["forward", 0, 3], ends, ["forward", 1, 12]], LIMITS if fault == "stop" else {}]}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": search_path(), "RAISES": "PeerFailed"}
    port, agents = free_port(), []
    for node in range(2):
        launcher = [each.format(port=port, node=node) for each in LAUNCHERS[kind]]
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", *launcher]
        with (tmp_path / f"output.{node}").open("w") as output:
            started = [*command, "--max-restarts=2", str(JOB), json.dumps(cases)]
            agents.append(subprocess.Popen(started, cwd=tmp_path, env=environment, stdout=output, stderr=output))
    ended = [agent.wait(LONG) for agent in agents]
    assert ended == [0, 0], "\n".join((tmp_path / f"output.{node}").read_text()[-6000:] for node in range(2))
    found = [json.loads((tmp_path / f"result.{rank}").read_text())["killed"] for rank in range(2)]
    require_undisturbed(found, whole)
    assert recoveries(tmp_path / "killed") == [("memory", 0, 3, 0, ""), ("memory", 1, 12, 0, "")]
    starts = [(tmp_path / f"starts.{rank}").read_text().split() for rank in range(2)]
    assert starts == [["null", '"memory"', "null", '"memory"']] * 2, "none has begun in vain"
