"""The command in a process of its own, and run directories made by the core itself."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from resume_adapters.core.run.run import ResumableRun
from resume_adapters.core.run_directory.status import RunState
from resume_adapters.core.state.stateful import StaticState

from launch import Running, Server
from miniature import GivenContent

COMMAND = Path(__file__).parent / "run_command.py"
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
def server() -> Iterator[Server]:
    """A process that has imported what most commands need, from which they are forked."""
    server = Server(
        "torch", "torch.distributed.checkpoint", "rich.progress", "pydantic.type_adapter", "resume_adapters.cli.app"
    )
    yield server
    server.close()


@pytest.fixture(scope="session")
def command(server: Server) -> Command:
    """Run ``resume-adapters`` with some words, 80 columns wide, and check that it ended without a traceback.

    Another program runs in an interpreter of its own.
    """

    def run(*words: object, code: str = MAIN, columns: int = 80) -> Outcome:
        environment = {"COLUMNS": str(columns), "NO_COLOR": "1"}
        if code == MAIN:
            done = forked(server, [str(each) for each in words], {**os.environ, **environment})
        else:
            done = interpreted(code, [str(each) for each in words], {**os.environ, **environment})
        assert "Traceback" not in done.err, done.err
        return done

    return run


@pytest.fixture
def start_command(server: Server) -> Callable[..., Running]:
    """Start ``resume-adapters`` in a directory of its own with some words, and return it as it runs."""

    def start(directory: Path, *words: object) -> Running:
        directory.mkdir()
        environment = {"COLUMNS": "80", "NO_COLOR": "1", "COMMAND_ERRORS": str(directory / "err")}
        return server.start(COMMAND, [str(each) for each in words], directory, 1, environment)

    return start


def forked(server: Server, words: list[str], environment: dict[str, str]) -> Outcome:
    """Run the command in a process that the server forks, in the directory of this one."""
    with tempfile.TemporaryDirectory() as outputs:
        out, err = Path(outputs, "out"), Path(outputs, "err")
        status = server.run(COMMAND, words, Path.cwd(), out, {**environment, "COMMAND_ERRORS": str(err)})
        return Outcome(status, out.read_text(), err.read_text() if err.exists() else "")


def interpreted(code: str, words: list[str], environment: dict[str, str]) -> Outcome:
    """Run a program in an interpreter that has imported nothing."""
    done = subprocess.run(
        [sys.executable, "-c", code, *words], env=environment, capture_output=True, text=True, timeout=540
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="session")
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
            run.saver.save(name, step, content, is_file=files)
        run.saver.flush()
        run.close()
        return run

    return make


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory, make_run: Callable[..., ResumableRun]) -> Path:
    directory = tmp_path_factory.mktemp("finished") / "run"
    saves = {
        step: {"metrics": {"eval_loss": loss, "accuracy": loss / 10}, "cursor": {"epoch": 0, "micro_batches": step}}
        for step, loss in ((10, 3.0), (20, 1.0), (30, 2.0))
    }
    make_run(directory, saves).set_state(RunState.FINISHED, step=30, epoch=3.0, horizon=30)
    return directory


@pytest.fixture
def run_dir(tmp_path: Path, finished_run: Path) -> Path:
    """A finished run of three checkpoints, of which the second evaluated best."""
    return shutil.copytree(finished_run, tmp_path / "run", symlinks=True)


_DIE_IN_A_SAVE = """
import os, sys
from resume_adapters.core.checkpoint.writer import Captured
from resume_adapters.core.run.run import ResumableRun
run = ResumableRun(sys.argv[1])
run.open()
class Dying:
    def save(self, directory):
        open(directory / "model.bin", "wb").close()
    def capture(self):
        return Captured({}, {}, {})
    def owner_of(self, file):  # it has its name by now
        os.kill(os.getpid(), 9)
name, step = "checkpoint-" + sys.argv[2], int(sys.argv[2])
run.saver.save(name, step, Dying())
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
