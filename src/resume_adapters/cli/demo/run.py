"""Train a run that is killed three times and one that is never killed, and compare them step by step.

Both runs train the package's example in processes of their own. The example writes the loss of each step to a file,
which a SIGKILL does not undo. The step that a launch resumed from is read from the run's journal.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from resume_adapters.cli.demo.kills import DemoFailed, Kill, Launch, Process, choose
from resume_adapters.cli.demo.result import Result, Run
from resume_adapters.core.checkpoint.layout import CONTROL
from resume_adapters.errors import MissingFramework, UnsupportedSetting

STEPS = 60
SAVE_STEPS = 5
EVAL_STEPS = 20

_NEEDED = {
    "hf": ("transformers", "accelerate", "matplotlib"),
    "accelerate": ("accelerate", "transformers", "matplotlib"),
    "lightning": ("lightning", "matplotlib"),
    "deepspeed": ("deepspeed", "matplotlib"),
}
_DIGEST = re.compile(r"weights sha256 ([0-9a-f]{64})")


def run(directory: Path, seed: int, framework: str) -> Result:
    """Train without kills, train with kills, compare, and plot.

    Args:
        directory: where the runs are saved.
        seed: decides the kills, the weights and the order of the data.
        framework: whose example to train.

    Raises:
        MissingFramework: an extra is not installed.
        UnsupportedSetting: the directory is not empty.
        DemoFailed: a training process failed.
    """
    _require_installed(framework)
    directory = Path(os.path.abspath(directory))
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UnsupportedSetting(f"{directory} is not an empty directory: name another with --dir, or remove it")
    directory.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    columns = TextColumn("{task.description:<12}"), BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=Console(stderr=True)) as progress:
        trainer = _Trainer(example(framework), directory, seed, progress)
        reference = trainer.train("reference", [])
        interrupted = trainer.train("interrupted", choose(seed, STEPS, SAVE_STEPS))
    picture = directory / "loss.png"
    from resume_adapters.cli.demo import plot

    plot.draw(picture, reference, interrupted)
    difference = first_difference(reference, interrupted)
    return Result(directory, seed, reference, interrupted, difference, picture, time.monotonic() - started)


def _require_installed(framework: str) -> None:
    missing = [name for name in _NEEDED[framework] if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingFramework(
            f"the demo needs {' and '.join(missing)}: pip install 'resume-adapters[cli,plots,{framework}]'"
        )


def example(framework: str) -> Path:
    """Return the framework's example: inside an installed package, or beside it in a source checkout."""
    name = f"examples/{framework}_train.py"
    package = Path(__file__).parents[2]
    shipped = package / name
    return shipped if shipped.is_file() else package.parents[1] / name


class _Trainer:
    """Launches the example until a run is finished."""

    def __init__(self, script: Path, directory: Path, seed: int, progress: Progress) -> None:
        self.script = script
        self.directory = directory
        self.seed = seed
        self.progress = progress

    def train(self, name: str, kills: list[Kill]) -> Run:
        """Train one run to its end: kill it as planned, and launch the same command again each time."""
        task = self.progress.add_task(name, total=STEPS, note="")
        launches = []
        for number, kill in enumerate([*kills, None], start=1):
            self.progress.update(task, note="starting python" if number == 1 else f"launch {number}: starting python")
            launches.append(self._process(name, task, number).run(kill))
            self._print_kill(launches[-1])
        starts = _starts(self.directory / name)
        if len(starts) != len(launches):
            raise DemoFailed(f"{len(launches)} launches of {name}, but its journal has {len(starts)} starts")
        self.progress.update(task, note="finished")
        return Run(tuple(launches), tuple(starts), _digest(self.directory / f"{name}.log"))

    def _process(self, name: str, task: TaskID, number: int) -> Process:
        trace = self.directory / f"{name}.trace.jsonl"
        options = {
            "--output-dir": self.directory / name,
            "--steps": STEPS,
            "--save-steps": SAVE_STEPS,
            "--eval-steps": EVAL_STEPS,
            "--seed": self.seed,
            "--trace": trace,
        }
        command = [sys.executable, str(self.script), "--cpu"]
        command += [str(word) for option in options.items() for word in option]
        # One thread: the number of threads changes the order of additions, and so the last bits.
        env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
        return Process(
            command,
            env,
            self.directory / f"{name}.log",
            trace,
            self.directory / name,
            lambda step: self._advance(name, task, number, step),
        )

    def _advance(self, name: str, task: TaskID, number: int, step: int) -> None:
        note = "training" if number == 1 else f"training, killed {number - 1} of 3 times"
        begun = _starts(self.directory / name)[-1]
        if number > 1 and step == begun + 1:
            self.progress.console.print(f"  launch {number} of the same command resumes from step {begun}")
        self.progress.update(task, completed=step, note=note)

    def _print_kill(self, launch: Launch) -> None:
        if launch.killed_at is not None:
            where = f"while {launch.pending} was being saved" if launch.inside_save else "between two saves"
            self.progress.console.print(f"  SIGKILL after step {launch.killed_at}, {where}", style="red")


def _starts(run_dir: Path) -> list[int]:
    """Return the step that each start of a run resumed from, according to its journal."""
    lines = (run_dir / CONTROL / "journal.jsonl").read_text().splitlines()
    return [int(entry["step"]) for entry in map(json.loads, lines) if entry["event"] == "start"]


def _digest(log: Path) -> str:
    found = _DIGEST.findall(log.read_text(errors="replace"))
    if len(found) != 1:
        raise DemoFailed(f"{log} holds {len(found)} digests of the weights; expected one, at its end", path=log)
    return str(found[0])


def first_difference(reference: Run, interrupted: Run) -> str | None:
    """Compare two runs bit for bit: losses and learning rates of every step, also of repeated ones, and the weights."""
    expected = {point.step: point for point in reference.points}
    for number, launch in enumerate(interrupted.launches, start=1):
        for point in launch.points:
            for name in ("loss", "learning_rate"):
                one, other = getattr(expected[point.step], name), getattr(point, name)
                if one.hex() != other.hex():
                    return f"step {point.step}: the {name} is {one!r} in the reference, {other!r} in launch {number}"
    never = set(expected) - {point.step for point in interrupted.points}
    if never or len(expected) != STEPS:
        return f"step {min(never, default=len(expected) + 1)} was never trained"
    if reference.digest != interrupted.digest:
        return f"the final weights are {reference.digest} in the reference, {interrupted.digest} after the kills"
    return None
