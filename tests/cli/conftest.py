"""The command in a process of its own, and run directories made by the core itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from miniature import Miniature

MAIN = "from resume_adapters.cli import main; main()"


@dataclass
class Outcome:
    """What one run of the command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Command = Callable[..., Outcome]


@pytest.fixture(scope="session")
def command() -> Command:
    """Run ``resume-adapters`` with some words, 80 columns wide, and check that it ended without a traceback."""

    def run(*words: object, code: str = MAIN) -> Outcome:
        done = subprocess.run(
            [sys.executable, "-c", code, *map(str, words)],
            env={**os.environ, "COLUMNS": "80", "NO_COLOR": "1"},
            capture_output=True,
            text=True,
            timeout=540,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return Outcome(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A finished run of three checkpoints, of which the second evaluated best."""
    directory = tmp_path / "run"
    run = Miniature(directory)
    for step, loss in ((10, 3.0), (20, 1.0), (30, 2.0)):
        run.commit(step, metrics={"eval_loss": loss, "accuracy": loss / 10}, cursor={"epoch": 0, "micro_batches": step})
    run.run.record("finished", step=30, epoch=3.0, horizon=30)
    run.run.close()
    return directory


@pytest.fixture
def pending() -> Callable[[Path, int], None]:
    """Leave a checkpoint pending: a save in which the process died."""

    def leave(run_dir: Path, step: int) -> None:
        code = (
            "import os, sys; from pathlib import Path; from miniature import Miniature;"
            "run = Miniature(Path(sys.argv[1]));"
            "run.run.save('checkpoint-' + sys.argv[2], int(sys.argv[2]), native=lambda: os.kill(os.getpid(), 9),"
            " own=dict, parts={}, owner=lambda file: 0, facts=dict)"
        )
        path = os.pathsep.join(sys.path)
        done = subprocess.run([sys.executable, "-c", code, run_dir, str(step)], env={**os.environ, "PYTHONPATH": path})
        assert done.returncode == -9

    return leave


def flip(file: Path) -> None:
    """Flip one bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.fixture(name="flip")
def _flip() -> Callable[[Path], None]:
    return flip
