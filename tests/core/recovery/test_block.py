"""A block is run again in its processes: on one and on several ranks, exactly as if nothing had failed."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from launch import Server
from recovering import agent_store, results

JOB = Path(__file__).parent / "job.py"


def undisturbed(found: dict[str, Any], name: str) -> None:
    """Assert that a run ended as the one without a fault, and that what it did last is what that one did."""
    whole, other = found["whole"], found[name]
    assert "error" not in other, (name, other)
    assert other["end"] == whole["end"], name
    begun = len(whole["trace"]) - len(other["trace"])
    assert other["trace"] == whole["trace"][begun:], name


@pytest.mark.thorough
def test_two_ranks_go_on_where_they_were(server: Server, tmp_path: Path) -> None:
    cases = {
        "whole": ([], {}),
        "each in turn": ([["forward", 1, 3], ["data", 0, 6], ["forward", 0, 9], ["end", 1, 13]], {}),
        "updating": ([["before", 1, 7], ["after", 0, 8]], {"measured": True}),
        "at once": ([["forward", 0, 8], ["forward", 1, 8]], {}),
        "cut": ([["forward", 1, 12], ["cut at its end", 0, 12]], {}),
        "left behind": ([["once it hangs", 0, 8], ["hang", 1, 8]], {"grace": 0.2}),
        "hung": ([["hang", 1, 8]], {"grace": 0.2, "hang_after": 3.0}),
        "slow": ([["slow", 0, 8]], {"grace": 0.2, "hang_after": 3.0}),
        "at the end": ([["at the end", 1, 18]], {}),
    }
    printed = []
    for rank, found in enumerate(results(server, JOB, tmp_path, 2, cases)):
        printed.append((tmp_path / f"output.{rank}").read_text())
        for name in cases:
            undisturbed(found, name)
        levels = {name: [level for _, level in found[name]["attempts"]] for name in cases}
        assert levels["whole"] == [None]
        assert levels["each in turn"] == [None, "memory", "memory", "memory", "disk"]
        assert set(levels["at once"][1:]) == {"memory"}  # the later of the two faults may come in the second attempt
        assert levels["left behind"] == levels["hung"] == levels["at the end"] == levels["cut"] == [None, "memory"]
        assert levels["slow"] == [None], "who is at work is waited for"
        assert found["updating"]["effects"]["children"] == 0
        assert found["whole"]["store timeout"] == 1800, "a rank waits for others that build their model"
        _, _, stacks = printed[rank].partition(f"The threads of rank {rank} are at")
        assert "in raise_at" in stacks or rank == 0
        assert "in watched" in stacks, "the rank that finds it has not left its step yet"
    both = "".join(printed)
    assert "rank 1 failed after step 8: Hung: rank 1 hangs in raise_at" in both
    assert "rank 0 is slow: no step has ended for 3 s; at work in work" in both


@pytest.mark.thorough
def test_a_process_that_is_stopped_is_named(server: Server, tmp_path: Path) -> None:
    """It cannot be led out: the others end, for the launcher to start all again."""
    cases = {"stopped": ([["stop", 1, 8]], {"grace": 5.0, "hang_after": 3.0, "meeting_timeout": 3.0})}
    with agent_store() as environment:
        env = {**environment, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        running = server.start(JOB, [json.dumps(cases)], tmp_path, 2, env)
        while running.alive() and not (tmp_path / "result.0").exists():
            time.sleep(0.1)
        running.signal(signal.SIGKILL, 1)
        running.wait()
    found = json.loads((tmp_path / "result.0").read_text())["stopped"]
    assert (
        found["error"] == "PeerFailed"
        and "rank 1 did not meet the others within 8 s after a failure: its process has died, or" in found["message"]
    )
    assert "Rank 1 hangs in a process that does not answer" in (tmp_path / "output.0").read_text()


@pytest.mark.thorough
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_fifty_recoveries_leave_nothing_behind(server: Server, tmp_path: Path) -> None:
    """After the first few, which make what a process makes once."""
    options = {"epochs": 17, "max_restarts": 60, "measured": True}

    def faults(count: int) -> list[list[Any]]:
        return [["forward", number % 2, 2 * number + 1] for number in range(count)]

    cases = {"few": (faults(4), options), "many": (faults(50), options)}
    for found in results(server, JOB, tmp_path, 2, cases, timeout=1100, settings={"MEMORY": "1"}):
        assert [level for _, level in found["many"]["attempts"]] == [None] + ["memory"] * 50
        assert found["many"]["end"] == found["few"]["end"]
        before, after = found["few"]["effects"], found["many"]["effects"]
        assert after.pop("descriptors") <= before.pop("descriptors")
        assert after.pop("megabytes") <= before.pop("megabytes") + 16
        assert after == before
    assert not list((tmp_path / "memory-of-node-0").iterdir())


@pytest.mark.thorough
@pytest.mark.parametrize(("ranks", "nodes"), [(2, 2), pytest.param(4, 2, marks=pytest.mark.long)])
def test_ranks_on_several_nodes_go_on_in_memory(server: Server, tmp_path: Path, ranks: int, nodes: int) -> None:
    """Each node has a memory of its own, and gets from the others what its ranks have not written."""
    last = ranks - 1
    cases = {
        "whole": ([], {}),
        "in turn": ([["forward", last, 3], ["data", 0, 6], ["end", last, 13]], {}),
        "in the first step": ([["forward", last, 3], ["before", 0, 3], ["forward", last, 4]], {}),
    }
    for rank, found in enumerate(results(server, JOB, tmp_path, ranks, cases, nodes=nodes)):
        for name in cases:
            undisturbed(found, name)
        levels = {name: [level for _, level in found[name]["attempts"]] for name in cases}
        assert levels["in turn"] == [None, "memory", "memory", "disk"], rank
        assert levels["in the first step"] == [None, "memory", "memory", "memory"], "what is in memory is still there"
    assert not [each for node in range(nodes) for each in (tmp_path / f"memory-of-node-{node}").iterdir()]
