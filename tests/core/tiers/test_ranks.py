"""Several ranks with a mirror: each copies its own files, and each node that lacks a checkpoint fetches it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import miniature
from launch import Server

JOB = Path(__file__).parents[1] / "job.py"

MIRRORED = {"step": 2, "text": "state at 2", "mirrored": [2], "generation": 2}


def results(server: Server, directory: Path, *words: str) -> list[dict[str, Any]]:
    """Run a job of two ranks, each on a node of its own, and return what each says."""
    server.start(JOB, [*words], directory, 2, {}, nodes=2).wait().require_success()
    return [json.loads((directory / f"result.{rank}").read_text()) for rank in range(2)]


@pytest.mark.parametrize("own", [False, True, "local"], ids=["shared", "whole", "node-local"])
def test_ranks_resume_from_the_mirror(tmp_path: Path, server: Server, own: bool | str) -> None:
    """With a directory for each node, only one of them is lost."""
    words = ["mirror", str(tmp_path / "run"), json.dumps(own), f"file://{tmp_path}/bucket"]
    assert results(server, tmp_path, *words) == [MIRRORED, MIRRORED]
    assert (tmp_path / "bucket" / "ranks-00001").exists() == bool(own)


def test_a_node_whose_own_part_is_damaged_gets_it_from_the_mirror(tmp_path: Path, server: Server) -> None:
    words = ["mirror", str(tmp_path / "run"), json.dumps("local"), f"file://{tmp_path}/bucket", "damage"]
    assert results(server, tmp_path, *words) == [MIRRORED, MIRRORED]
    assert miniature.set_aside(tmp_path / "run" / "0") == []
    assert miniature.set_aside(tmp_path / "run" / "1") == ["checkpoint-2.superseded.1"]


@pytest.mark.thorough
@pytest.mark.parametrize("own", [False, pytest.param("local", marks=pytest.mark.long)], ids=["shared", "node-local"])
def test_a_rank_may_take_longer_for_a_copy_than_others_wait_for_one(
    tmp_path: Path, server: Server, own: bool | str
) -> None:
    """In most trainings one rank writes all large files, so it copies and fetches them too; the others have to wait."""
    words = ["copy_slowly", str(tmp_path / "run"), json.dumps(own), f"file://{tmp_path}/bucket"]
    assert results(server, tmp_path, *words) == [MIRRORED, MIRRORED]


@pytest.mark.parametrize(
    ("own", "nodes"),
    [(False, 2), pytest.param(True, 2, marks=pytest.mark.thorough), ("local", 2), (False, 1)],
    ids=["shared", "whole", "node-local", "one node"],
)
def test_nodes_resume_from_their_memories(tmp_path: Path, server: Server, own: bool | str, nodes: int) -> None:
    """Where they share the run directory, each node has a whole save in its memory."""
    found = results(server, tmp_path, "remember", str(tmp_path), json.dumps(own), str(nodes))
    assert found[0] == found[1]
    steps = found[0]["in_memory"]
    expected = steps[-1]
    assert (found[0]["step"], found[0]["text"], found[0]["problem"]) == (expected, f"state at {expected}", "")
    assert found[0]["left"] == []


@pytest.mark.parametrize("when", ["begin", "end"])
def test_a_memory_that_the_leader_of_a_node_cannot_tidy_ends_no_run(tmp_path: Path, server: Server, when: str) -> None:
    """The other ranks learn of it: all go on without the memory, or leave what is there."""
    output = server.start(JOB, ["tidy", str(tmp_path), when], tmp_path, 2, {}, nodes=2).wait().require_success().output
    for rank in range(2):
        found = json.loads((tmp_path / f"result.{rank}").read_text())
        assert found["step"] == 1 and found["held"] == (when == "end")
        assert "rank 0 could not" in found["problem"] or "cannot be" in found["problem"]
    assert output.count("nothing more is kept in memory") == 1
    assert output.count("`rm -r ") == (when == "end")


def test_of_a_later_start_that_one_rank_finds_in_memory_all_learn(tmp_path: Path, server: Server) -> None:
    for found in results(server, tmp_path, "fence_memory", str(tmp_path)):
        assert found["errors"] == ["FencedOff", "PeerFailed"]


def test_of_a_mirror_that_one_rank_cannot_open_all_learn(tmp_path: Path, server: Server) -> None:
    """The others would wait for its channel."""
    found = results(server, tmp_path, "lack", str(tmp_path))
    assert [each["error"] for each in found] == ["PeerFailed", "MissingFramework"]
    assert "rank 1 could not open the mirrors" in found[0]["message"]
