"""One script, submitted once, to a real Slurm: preempted, warned, out of time, and at last as if nothing had been."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, running

HERE = Path(__file__).parent

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="starting Slurm's daemons needs root")


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with running() as started:
        yield started


def journal(directory: Path) -> list[dict[str, Any]]:
    file = directory / "out" / ".resume" / "journal.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def until(is_so: Any, what: str, cluster: Cluster, job: str, directory: Path, timeout: float = 120.0) -> None:
    """Wait; where the job is held back after a requeue, start it soon.

    slurmd takes a launch within the second in which it ended the job for one of before, and the job fails.
    """
    log = directory / "slurm.log"
    deadline = time.monotonic() + timeout
    while not is_so():
        state = cluster.ask("squeue", "-h", "-j", job, "-o", "%T %r", check=False)
        if "BeginTime" in state:
            time.sleep(2)
            cluster.ask("scontrol", "update", f"jobid={job}", "starttime=now", check=False)
        if time.monotonic() >= deadline:
            job_now = cluster.ask("scontrol", "show", "job", job, check=False)
            said = f"{log.read_text() if log.exists() else ''}\n{cluster.logs()}"
            raise AssertionError(f"no {what}: {job_now}\n{said}")
        time.sleep(0.2)


def test_a_job_submitted_once_ends_as_if_it_had_not_been_interrupted(cluster: Cluster, tmp_path: Path) -> None:
    reference, directory = tmp_path / "reference", tmp_path / "job"
    reference.mkdir()
    directory.mkdir()
    subprocess.run([sys.executable, HERE / "job.py", reference], check=True, capture_output=True, timeout=300)

    environment = {**cluster.environment, "PYTHON": sys.executable, "JOB": str(HERE / "job.py")}
    submitted = ["sbatch", "--parsable", f"--chdir={directory}", HERE / "job.sbatch"]
    done = subprocess.run(submitted, env=environment, capture_output=True, text=True, check=True)
    job = done.stdout.strip()

    def stops() -> list[str]:
        return [entry["reason"] for entry in journal(directory) if entry["event"] == "stopped"]

    until(
        lambda: any(entry["event"] == "commit" for entry in journal(directory)), "first commit", cluster, job, directory
    )
    cluster.ask("scontrol", "requeue", job)
    for number, what in enumerate(["preemption", "warning", "end of the walltime"], start=1):
        until(lambda number=number: len(stops()) >= number, what, cluster, job, directory)
    until(lambda: (directory / "final").exists(), "end", cluster, job, directory)

    assert stops() == ["SIGTERM", "SIGUSR1", "the walltime is nearly over"]
    starts = [entry["step"] for entry in journal(directory) if entry["event"] == "start"]
    assert len(starts) == 4
    assert starts == sorted(set(starts))
    assert (directory / "final").read_text() == (reference / "final").read_text()
    expected = dict(map(json.loads, (reference / "trace").read_text().splitlines()))
    steps = list(map(json.loads, (directory / "trace").read_text().splitlines()))
    assert [step for step, _ in steps] == list(range(1, 1501)), "no step was lost, and none was done twice"
    assert dict(steps) == expected
