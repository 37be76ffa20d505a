"""The command in a process of its own, and run directories made by the core itself."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from resume_adapters.core.run.run import ResumableRun
from resume_adapters.core.run_directory.status import RunState
from resume_adapters.core.state.stateful import StaticState

from miniature import GivenContent

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
def make_run() -> Callable[..., ResumableRun]:
    """Commit checkpoints of some steps, each with facts of its manifest, and return the run that did."""

    def make(
        directory: Path, saves: dict[int, dict[str, Any]], best: int | None = None, *, files: bool = False
    ) -> ResumableRun:
        def write(name: str, path: Path) -> None:
            (path if files else path / "model.bin").write_bytes(name.encode() * 20)

        run = ResumableRun(directory)
        run.open()
        for step, facts in saves.items():
            name = f"step={step}.ckpt" if files else f"checkpoint-{step}"
            facts = {"epoch": step / 10, "best": None if best is None else f"checkpoint-{best}", **facts}
            content = GivenContent(functools.partial(write, name), {"ema": StaticState({"step": step})}, **facts)
            run.save(name, step, content, is_file=files)
        run.flush()
        run.close()
        return run

    return make


@pytest.fixture
def run_dir(tmp_path: Path, make_run: Callable[..., ResumableRun]) -> Path:
    """A finished run of three checkpoints, of which the second evaluated best."""
    directory = tmp_path / "run"
    saves = {
        step: {"metrics": {"eval_loss": loss, "accuracy": loss / 10}, "cursor": {"epoch": 0, "micro_batches": step}}
        for step, loss in ((10, 3.0), (20, 1.0), (30, 2.0))
    }
    make_run(directory, saves).set_state(RunState.FINISHED, step=30, epoch=3.0, horizon=30)
    return directory


_DIE_IN_A_SAVE = """
import os, sys
from resume_adapters.core.run.run import ResumableRun
run = ResumableRun(sys.argv[1])
run.open()
class Dying:
    def save(self, directory):
        pass
    def rank_state(self):
        return {}
    def parts(self):
        return {}
    def describe(self, rank_state):  # it has its name by now
        os.kill(os.getpid(), 9)
name, step = "checkpoint-" + sys.argv[2], int(sys.argv[2])
run.save(name, step, Dying())
"""


@pytest.fixture
def pending() -> Callable[[Path, int], None]:
    """Leave a checkpoint pending: a save in which the process died."""

    def leave(run_dir: Path, step: int) -> None:
        done = subprocess.run([sys.executable, "-c", _DIE_IN_A_SAVE, run_dir, str(step)])
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
