"""Sharded saves that leave through memory: those of ``torch.distributed.checkpoint``, on two ranks."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from launch import LONG, Outcome, Server

JOB = Path(__file__).parent / "shards.py"


def launch(server: Server, directory: Path, *asked: str) -> tuple[Outcome, list[dict[str, Any]]]:
    work = directory / asked[0]
    work.mkdir()
    outcome = server.start(JOB, [asked[0], str(directory), *asked[1:]], work, 2, {}).wait(LONG)
    return outcome, [json.loads(each.read_text()) for each in sorted(work.glob("result.*"))]


@pytest.mark.parametrize("stage", ["memory", "off"])
def test_the_files_are_those_of_the_bare_library(server: Server, tmp_path: Path, stage: str) -> None:
    """Law 11: everything changes between each save and its commit."""
    outcome, results = launch(server, tmp_path, "exact", stage)
    outcome.require_success()
    for each, count in zip(results, (12, 16), strict=True):
        assert each["committed"] == 5
        assert each["decision"].startswith("" if stage == "off" else f"{stage}: ")
        # Two weights, two biases, and the moments of each; one rank writes the counts of steps.
        assert each["copied"] == ([] if stage == "off" else [count] * 4)


def test_a_kill_between_the_copy_and_the_commit_leaves_the_checkpoint_before(server: Server, tmp_path: Path) -> None:
    outcome, _ = launch(server, tmp_path, "kill", "memory")
    assert outcome.statuses == (-signal.SIGKILL,) * 2, outcome.output
    assert not (tmp_path / "run" / "checkpoint-4").exists()
    outcome, results = launch(server, tmp_path, "resume", "memory")
    outcome.require_success()
    assert [(each["resumed"], each["committed"]) for each in results] == [(3, 4)] * 2
