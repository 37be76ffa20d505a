"""What is asked of Slurm, by programs of its names that a test puts first on the path."""

from __future__ import annotations

from pathlib import Path

import pytest

from resume_adapters.core.stop import walltime
from resume_adapters.core.stop.policy import WALLTIME, StopOn
from resume_adapters.errors import Stopped

from miniature import Miniature


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", str(directory))
    return directory


def command(directory: Path, name: str, script: str) -> None:
    (directory / name).write_text(f"#!/bin/sh\n{script}\n")
    (directory / name).chmod(0o755)


def test_it_says_how_long_a_job_may_go_on(commands: Path, caplog: pytest.LogCaptureFixture) -> None:
    command(commands, "squeue", 'echo " $3 1:02:03 "')
    assert walltime.slurm_time_left("17") == "17 1:02:03"
    command(commands, "squeue", "echo no such job >&2; exit 1")
    assert walltime.slurm_time_left("17") is None
    assert "squeue -h -j 17 -o %L failed: no such job" in caplog.text
    assert not walltime.slurm_requeue("17")
    assert "scontrol requeue 17 failed: [Errno 2] No such file" in caplog.text


@pytest.mark.parametrize(("reason", "queued"), [(WALLTIME, True), ("a human asked", False)])
def test_a_job_whose_time_is_over_is_queued_again(
    commands: Path, tmp_path: Path, reason: str, queued: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    command(commands, "scontrol", f"echo $@ >> {tmp_path}/asked")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    job = Miniature(tmp_path / "run", stop=StopOn(requeue="slurm"))
    job.commit(10)
    job.run.flag.request(reason)
    with pytest.raises(Stopped):
        job.run.leave(10, 1.0)
    assert (tmp_path / "asked").exists() == queued
    assert not queued or (tmp_path / "asked").read_text() == "requeue 4711\n"
