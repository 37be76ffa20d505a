"""The example as a user has it: five lines more than a bare loop, started by ``accelerate launch`` on two processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch import TIMEOUT, free_port

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "accelerate_train.py"


def test_the_example_marks_the_five_lines_that_the_page_speaks_of() -> None:
    marked = re.findall(r"  # (\d)\b", EXAMPLE.read_text())
    assert marked == ["1", "2", "3", "4", "5"]
    assert "`examples/accelerate_train.py` marks the five lines." in (ROOT / "docs" / "accelerate.md").read_text()


def launched(directory: Path, name: str, **settings: str) -> subprocess.Popen[bytes]:
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    launcher += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    launcher += ["--main_process_port", str(free_port())]
    script = [str(EXAMPLE), "--cpu", "--steps", "16", "--save-steps", "5", "--eval-steps", "8"]
    command = [*launcher, *script, "--output-dir", name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RESUME_ADAPTERS_TRACE": f"{name}.trace", **settings}
    with (directory / f"{name}.log").open("ab") as log:
        return subprocess.Popen(command, cwd=directory, env=environment, stdout=log, stderr=log, start_new_session=True)


@pytest.mark.thorough
def test_on_two_processes_of_accelerate_launch(tmp_path: Path) -> None:
    assert launched(tmp_path, "reference").wait(TIMEOUT) == 0
    running = launched(tmp_path, "killed", RESUME_ADAPTERS_PAUSE="step:12")
    trace = tmp_path / "killed.trace"
    while not trace.exists() or '"paused"' not in trace.read_text():
        assert running.poll() is None, (tmp_path / "killed.log").read_text()
        time.sleep(0.02)
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    assert launched(tmp_path, "killed").wait(TIMEOUT) == 0
    logs = [(tmp_path / f"{name}.log").read_text() for name in ("reference", "killed")]
    assert "Resuming from checkpoint_1" in logs[1] or "Resuming from checkpoint_5" in logs[1]
    digests = [re.findall(r"weights sha256 (\w+)", log) for log in logs]
    assert digests[0] == digests[1] and len(digests[0]) == 1
