"""As users start them: with torchrun, with the ``deepspeed`` launcher, and the example as a plain script."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import contract
from launch import TIMEOUT, free_port

EXAMPLE = Path(__file__).parents[2] / "examples" / "deepspeed_train.py"
CONFIG = {"stage": 3, "rank_seeds": True, "augment": True}


@pytest.mark.thorough
@pytest.mark.long
def test_torchrun_and_then_the_deepspeed_launcher(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    expected = reference(CONFIG, 2)
    command = [str(bench.script), "config.json"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", "2", "--no_local_rank"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(contract.__file__).parent)}
    kill = {"event": "backward", "step": 8, "rank": 1}
    for start, changes in ((torchrun, {"kill": kill}), (launcher, {})):
        for old in tmp_path.glob("trace.*"):
            old.unlink()
        (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
        port = ["--master_port", str(free_port())]
        done = subprocess.run([*start, *port, *command], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert (done.returncode != 0) == bool(changes), done.stdout + done.stderr
        assert not changes or contract.committed(tmp_path / "out") == {"global_step5": 5}
    trace = contract.read_trace(tmp_path, 2)
    contract.require_same_steps(trace, expected, start=5)
    contract.require_same_end(trace, expected)


OPTIONS = ["--cpu", "--steps", "12", "--save-steps", "3", "--eval-steps", "6"]


@pytest.mark.thorough
def test_the_example_is_killed_and_started_again(bench: contract.Bench, tmp_path: Path) -> None:
    """As a user has it, on one process; the run that it is compared with is forked."""
    arguments = [*OPTIONS, "--output-dir", "reference"]
    reference = bench.server.start(EXAMPLE, arguments, tmp_path, 1, {}).wait().require_success()
    running = example(tmp_path, RESUME_ADAPTERS_PAUSE="step:8")
    trace = tmp_path / "killed.trace"
    while not trace.exists() or '"paused"' not in trace.read_text():
        assert running.poll() is None, (tmp_path / "killed.log").read_text()
        time.sleep(0.02)
    running.kill()
    running.wait()
    assert example(tmp_path).wait(TIMEOUT) == 0
    log = (tmp_path / "killed.log").read_text()
    assert "Resuming from global_step" in log
    digests = [re.findall(r"weights sha256 (\w+)", text) for text in (reference.output, log)]
    assert digests[0] == digests[1] and len(digests[0]) == 1


def example(directory: Path, **settings: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(EXAMPLE), *OPTIONS, "--output-dir", "killed"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RESUME_ADAPTERS_TRACE": "killed.trace", **settings}
    with (directory / "killed.log").open("ab") as log:
        return subprocess.Popen(command, cwd=directory, env=environment, stdout=log, stderr=log)
