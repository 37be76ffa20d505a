"""The launch files of the environments do what their page says: each is run as it is, and its job is interrupted."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

import chain

EXAMPLES = Path(__file__).parents[2] / "examples"

COMMANDS = {
    "python": f'exec "{sys.executable}" "$@"',
    "torchrun": f'exec "{sys.executable}" -m torch.distributed.run "$@"',
    "sleep": "exec /bin/sleep 0.1",  # what the scripts wait between two attempts
    "curl": "test -e reclaimed",  # the provider's service: a warning is there, or it is not
}


class Machine:
    """A directory with ``train.py``, and the commands that the launch files call."""

    def __init__(self, root: Path, exit_code: int) -> None:
        self.root = root
        shutil.copy(chain.__file__, root / "train.py")
        (root / "bin").mkdir()
        for name, body in COMMANDS.items():
            (root / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
            (root / "bin" / name).chmod(0o755)
        self.environment = {
            **os.environ,
            "PATH": f"{root / 'bin'}:/usr/bin:/bin",
            "PYTHONPATH": str(Path(__file__).parents[1]),
            "OMP_NUM_THREADS": "1",
            "EXIT_CODE": str(exit_code),
        }

    def at(self, step: int, what: str) -> None:
        """Let something happen to the job in this step, once."""
        (self.root / f"at-{step}").write_text(what)

    def launch(self, *command: str | Path) -> int:
        done = subprocess.run(
            command, cwd=self.root, env=self.environment, capture_output=True, text=True, check=False, timeout=300
        )
        print(done.stdout, done.stderr)
        return done.returncode

    def require_exact(self, events: Sequence[str]) -> None:
        """Require the final state of an uninterrupted run, after these events of the journal."""
        journal = (self.root / "runs" / "a" / ".resume" / "journal.jsonl").read_text().splitlines()
        found = [entry["event"] for entry in map(json.loads, journal)]
        assert [event for event in found if event in ("start", "stopped", "finished")] == list(events)
        expected = functools.reduce(chain.advance, range(1, chain.STEPS + 1), "start")
        assert (self.root / "final").read_text() == expected


@pytest.mark.thorough
def test_the_loop_goes_on_after_a_crash_and_ends_with_a_stop(tmp_path: Path) -> None:
    machine = Machine(tmp_path, exit_code=85)
    machine.at(10, "SIGKILL")
    machine.at(17, "SIGTERM")
    assert machine.launch("bash", EXAMPLES / "loop.sh") == 85
    assert machine.launch("bash", EXAMPLES / "loop.sh") == 0
    machine.require_exact(["start", "start", "stopped", "start", "finished"])


@pytest.mark.thorough
def test_the_watcher_of_a_spot_instance_asks_for_a_stop(tmp_path: Path) -> None:
    machine = Machine(tmp_path, exit_code=0)
    machine.at(10, "reclaimed")
    assert machine.launch("bash", EXAMPLES / "spot.sh") == 0
    (tmp_path / "reclaimed").unlink()
    assert machine.launch("bash", EXAMPLES / "spot.sh") == 0
    machine.require_exact(["start", "stopped", "start", "finished"])


@pytest.mark.thorough
def test_the_container_of_a_pod_saves_at_its_end_and_the_next_pod_goes_on(tmp_path: Path) -> None:
    job: Any = yaml.safe_load((EXAMPLES / "kubernetes.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    machine = Machine(tmp_path, exit_code=85)
    machine.at(10, "SIGTERM")
    assert [machine.launch(*container["command"]) for _ in range(2)] == [85, 0]
    machine.require_exact(["start", "stopped", "start", "finished"])


@pytest.mark.thorough
def test_torchrun_starts_its_workers_again(tmp_path: Path) -> None:
    """With one worker: the second group of several may not connect through gloo, with or without this package."""
    machine = Machine(tmp_path, exit_code=0)
    machine.at(10, "SIGKILL")
    script = tmp_path / "torchrun.sh"
    script.write_text((EXAMPLES / "torchrun.sh").read_text().replace("--nproc-per-node=4", "--nproc-per-node=1"))
    assert machine.launch("bash", script) == 0
    machine.require_exact(["start", "start", "finished"])
