"""What a run does to its process, ``close`` undoes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from resume_adapters import KeepLast
from resume_adapters.errors import NoValidCheckpoint

import faults
from launch import Server
from miniature import Miniature, effects, left_behind

JOB = Path(__file__).parents[1] / "job.py"

TIMES = 100


def open_and_close(directory: Path, step: int) -> None:
    job = Miniature(directory, ranks=None, keep=KeepLast(1))
    job.run.begin(job.step, 0.0)
    job.commit(step)
    job.run.steps.end_step(step, 0.0)
    job.run.close()


def test_a_run_is_opened_and_closed_a_hundred_times_and_nothing_is_left(tmp_path: Path) -> None:
    open_and_close(tmp_path, 1)
    before = effects()
    for step in range(2, TIMES + 2):
        open_and_close(tmp_path, step)
    assert not left_behind(before)


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
def test_so_it_is_on_two_ranks(server: Server, tmp_path: Path, own: bool) -> None:
    """They share a run directory, or are two nodes that have their own."""
    words = ["reopen", str(tmp_path / "run"), json.dumps(own), "8"]  # each time makes process groups, which is slow
    server.start(JOB, words, tmp_path, 2, {}, nodes=2).wait().require_success()
    for rank in range(2):
        assert json.loads((tmp_path / f"result.{rank}").read_text()) == {"left": {}}


def test_a_start_that_is_refused_leaves_nothing(tmp_path: Path) -> None:
    open_and_close(tmp_path, 10)
    faults.cut(tmp_path / "checkpoint-10" / "model.bin")
    before = effects()
    with pytest.raises(NoValidCheckpoint):
        Miniature(tmp_path)
    assert not left_behind(before)


def test_a_run_that_was_never_opened_closes_and_closes_again(tmp_path: Path) -> None:
    job = Miniature(tmp_path)
    job.commit(10)
    job.run.close()
    job.run.close()
