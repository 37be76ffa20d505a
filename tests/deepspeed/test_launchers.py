"""A run that torchrun started and lost is continued by the ``deepspeed`` launcher, as users start them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import contract
from launch import free_port

CONFIG = {"stage": 3, "rank_seeds": True, "augment": True}


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
