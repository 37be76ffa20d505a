"""A process of a block dies, and new ones go on with what the others hold, exactly as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launch import LONG, Server, free_port, search_path
from recovering import Agent, after_kills, results

JOB = Path(__file__).parent / "job.py"

BY = ["by their supervisors", "by the launcher"]
"""Who starts the next processes."""


@pytest.fixture(scope="module")
def whole(server: Server, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    found = results(server, JOB, tmp_path_factory.mktemp("whole"), 2, {"whole": ([], {})})
    return [each["whole"] for each in found]


def require_undisturbed(found: list[dict[str, Any]], whole: list[dict[str, Any]]) -> None:
    for mine, other in zip(found, whole, strict=True):
        assert mine["end"] == other["end"]
        begun = len(other["trace"]) - len(mine["trace"])
        assert mine["trace"] == other["trace"][begun:]


def recoveries(directory: Path) -> list[tuple[Any, ...]]:
    journal = [json.loads(line) for line in (directory / "killed/.resume/journal.jsonl").open()]
    found = [each for each in journal if each["event"] == "recovery"]
    return [(each["level"], each["rank"], each["step"], each["lost"]) for each in found]


@pytest.mark.parametrize("restarts", [0, 3], ids=["by their supervisors", "by the launcher"])
def test_ranks_that_die_lose_no_step(
    server: Server, tmp_path: Path, whole: list[dict[str, Any]], restarts: int
) -> None:
    faults = [["forward", 0, 3, "kill"], ["data", 1, 7, "kill"], ["save", 0, 10, "kill"]]
    found = after_kills(server, JOB, tmp_path, 2, [faults, {"threads": bool(restarts)}], restarts)
    require_undisturbed(found, whole)
    assert [each["levels"] for each in found] == [[None, *["process"] * 3]] * 2
    assert recoveries(tmp_path) == [("process", 0, 3, 0), ("process", 1, 7, 0), ("process", 0, 10, 0)]


@pytest.mark.thorough
@pytest.mark.parametrize("threads", [False, True], ids=BY)
def test_a_rank_that_dies_while_weights_change_is_replaced(
    server: Server, tmp_path: Path, whole: list[dict[str, Any]], threads: bool
) -> None:
    """The others may have changed theirs; what no two ranks hold together is read from the disk."""
    faults = [["before", 1, 7, "kill"], ["after", 0, 12, "kill"], ["at the end", 1, 18, "kill"]]
    found = after_kills(server, JOB, tmp_path, 2, [faults, {"threads": threads}])
    require_undisturbed(found, whole)
    for each in found:
        assert set(each["levels"][1:3]) <= {"process", "disk"} and len(each["levels"]) == 4


@pytest.mark.thorough
@pytest.mark.parametrize("threads", [False, True], ids=BY)
def test_a_rank_that_dies_while_new_processes_begin_loses_no_step(
    server: Server, tmp_path: Path, whole: list[dict[str, Any]], threads: bool
) -> None:
    """Twice before the training begins, and twice in its first step: what is in memory is still there."""
    in_turn = [["forward", 1, 7], ["start", 0, 1], ["start", 1, 2], ["forward of start 3", 1, 7], ["after", 0, 7]]
    found = after_kills(server, JOB, tmp_path, 2, [[[*each, "kill"] for each in in_turn], {"threads": threads}])
    require_undisturbed(found, whole)
    assert {level for each in found for level in each["levels"][1:]} == {"process"}
    assert [lost for _, _, _, lost in recoveries(tmp_path)] in ([0], [1])


@pytest.mark.thorough
@pytest.mark.parametrize(("ranks", "threads"), [(2, False), (3, False), (3, True)])
def test_a_process_that_dies_while_the_others_write_to_memory_changes_nothing(
    server: Server, tmp_path: Path, ranks: int, threads: bool
) -> None:
    """A rank that is left, or the process that stands in for the one that died."""
    (tmp_path / "whole").mkdir()
    whole = [each["whole"] for each in results(server, JOB, tmp_path / "whole", ranks, {"whole": ([], {})})]
    faults = [["forward", 1, 7, "kill"], ["save", 0, 7, "kill"]]
    found = after_kills(server, JOB, tmp_path, ranks, [faults, {"threads": threads}])
    require_undisturbed(found, whole)
    assert {len(each["levels"]) for each in found} == {2}


OF_THREE = [(3, [2]), (7, [0, 1]), (13, [0, 1, 2])]
"""Where which of three ranks die."""


@pytest.mark.thorough
@pytest.mark.parametrize("threads", [False, True], ids=BY)
def test_one_two_and_all_of_three_ranks_die(server: Server, tmp_path: Path, threads: bool) -> None:
    (tmp_path / "whole").mkdir()
    whole = [each["whole"] for each in results(server, JOB, tmp_path / "whole", 3, {"whole": ([], {})})]
    faults = [["forward", rank, step, "kill"] for step, ranks in OF_THREE for rank in ranks]
    found = after_kills(server, JOB, tmp_path, 3, [faults, {"threads": threads}])
    require_undisturbed(found, whole)
    for each in found:
        assert each["levels"][1] == "process"


@pytest.mark.thorough
def test_workers_of_loaders_that_are_ended_too_are_no_failure(server: Server, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    found = results(server, JOB, tmp_path / "whole", 2, {"whole": ([], {"workers": 1})})
    faults = [["forward", 0, 3, "kill"], ["forward", 1, 8, "kill"], ["forward", 0, 14, "kill"]]
    after = after_kills(server, JOB, tmp_path, 2, [faults, {"workers": 1, "threads": True}])
    require_undisturbed(after, [each["whole"] for each in found])
    assert [each["levels"] for each in after] == [[None, *["process"] * 3]] * 2


def test_a_rank_that_has_not_failed_says_which_one_has(server: Server, tmp_path: Path) -> None:
    found = results(server, JOB, tmp_path, 2, {"given up": ([["forward", 1, 3]], {"max_restarts": 0})})
    assert [each["given up"]["error"] for each in found] == ["PeerFailed", "RuntimeError"]
    assert [each["given up"]["has group"] for each in found] == [False, False], "what was cut cannot be used"
    assert "rank 1 failed after step 3: RuntimeError: forward at 3. The block was" in found[0]["given up"]["message"]


@pytest.mark.thorough
def test_torchrun_as_it_is(tmp_path: Path, whole: list[dict[str, Any]]) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2"]
    cases = {"killed": [[["forward", 0, 7, "kill"], ["data", 1, 12, "kill"]], {}]}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": search_path()}
    done = subprocess.run([*command, JOB, json.dumps(cases)], cwd=tmp_path, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-6000:]
    found = [json.loads((tmp_path / f"result.{rank}").read_text())["killed"] for rank in range(2)]
    require_undisturbed(found, whole)
    assert recoveries(tmp_path) == [("process", 0, 7, 0), ("process", 1, 12, 0)]


LAUNCHERS = {
    "c10d": ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=test", "--local-addr=127.0.0.1"],
    "static": ["--node-rank={node}", "--master-addr=127.0.0.1", "--master-port={port}"],
}
"""How torchrun brings nodes together. Each has restarts of its own, and counts those of other nodes or not."""


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["c10d", pytest.param("static", marks=pytest.mark.long)])
def test_torchrun_as_it_is_on_two_nodes(tmp_path: Path, whole: list[dict[str, Any]], kind: str) -> None:
    """An exception before and after a process has died. They agree which start they are, though the counts differ."""
    cases = {"killed": [[["forward", 0, 3], ["data", 1, 7, "kill"], ["forward", 1, 12]], {}]}
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
    assert recoveries(tmp_path) == [("memory", 0, 3, 0), ("memory", 1, 12, 0)]
    starts = [(tmp_path / f"starts.{rank}").read_text().split() for rank in range(2)]
    assert starts == [["null", '"memory"', "null", '"memory"']] * 2, "none has begun in vain"


@pytest.mark.thorough
@pytest.mark.parametrize("threads", [False, True], ids=BY)
@pytest.mark.parametrize("rank", [0, 1])
def test_where_nobody_starts_another_process_the_run_has_failed(
    server: Server, tmp_path: Path, rank: int, threads: bool
) -> None:
    faults = [["forward", 0, 1, "kill"], ["forward", rank, 3, "kill"]][threads:]
    case = [faults, {"threads": threads, "max_restarts": 1}]
    agent = Agent(server, JOB, [json.dumps({"killed": case})], tmp_path, 2, 0)
    assert agent.statuses[rank] == -signal.SIGKILL
    assert f"rank {rank} failed after step 3: ProcessDied" in agent.outputs[0]
    status = json.loads((tmp_path / "killed/.resume/status.json").read_text())
    assert status["state"] == "failed"
    assert not agent.left_in_memory
