"""What a hand-written Accelerate loop pays: time added to a step, and a 500 MB save against a bare ``save_state``.

``python -m benchmarks.loops DIRECTORY [--with-package]`` is one job that saves; its last line is a JSON record.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from benchmarks import figure
from benchmarks.figure import Figure
from benchmarks.job import SAVES, WIDTH
from benchmarks.saves import GOAL_BLOCKED, GOAL_RATIO
from benchmarks.steps import GOAL_MICROSECONDS
from benchmarks.turns import ROUND, serve, taking_turns

GOAL_TRACE = 5
_ROUND = 20
_TEN_MILLISECONDS = {"width": 512, "layers": 4, "batch": 56}
"""A model of a million parameters, whose step takes about that long on one core."""


def measure_steps(steps: int) -> list[Figure]:
    """Return the processor time added per step: two loops take turns."""
    with tempfile.TemporaryDirectory() as directory:
        job = ["-m", "benchmarks.loops", directory, "--steps"]
        bare, package = ([each * 1e6 for each in of] for of in taking_turns([job, [*job, "--with-package"]], steps))
    return [
        figure.of(
            "Accelerate loop: processor time added per step",
            [more - less for less, more in zip(bare, package, strict=True)],
            "us",
            GOAL_MICROSECONDS,
            detail=f"{len(bare)} pairs of {ROUND} steps; a bare one takes {figure.median(bare):.0f} us",
        )
    ]


def measure_saves(rounds: int) -> list[Figure]:
    """Return how long the training is blocked, and until the checkpoint is safe, as ratios to a bare ``save_state``."""
    records: dict[bool, dict[str, list[float]]] = {each: {"blocked": [], "safe": []} for each in (False, True)}
    for _ in range(rounds):
        for with_package in (False, True):
            with tempfile.TemporaryDirectory() as directory:
                for name, values in _run(Path(directory), with_package).items():
                    records[with_package][name] += values
    whats = {
        "blocked": ("training blocked, against bare", GOAL_BLOCKED),
        "safe": ("until committed, against bare with fsync", GOAL_RATIO),
    }
    return [
        figure.of(
            f"Accelerate loop, 500 MB save: {what}",
            [seconds / figure.median(records[False][name]) for seconds in records[True][name]],
            "x",
            goal,
            detail=f"bare takes {figure.median(records[False][name]):.2f} s",
        )
        for name, (what, goal) in whats.items()
    ]


def measure_trace(rounds: int) -> list[Figure]:
    """Return what the step trace adds to a step of about 10 ms, and what the package adds without it.

    A global hook of torch sees the optimizers of every loop in the process, so the loops come one after the other, in
    short rounds, and the figures are ratios of neighbours.
    """
    seconds: dict[str, list[float]] = {"bare": [], "off": [], "on": []}
    for _ in range(rounds):
        for kind, each in seconds.items():
            with tempfile.TemporaryDirectory() as directory, _environment(Path(directory), traced=kind == "on"):
                steps = _steps(Path(directory), with_package=kind != "bare", **_TEN_MILLISECONDS)
                each.append(statistics.mean([next(steps) for _ in range(2 * _ROUND)][_ROUND:]))
                steps.close()
    detail = f"{rounds} rounds of {_ROUND} steps; a bare one takes {figure.median(seconds['bare']) * 1e3:.1f} ms"
    return [
        figure.of(
            name,
            [100 * (more / less - 1) for less, more in zip(seconds[without], seconds[kind], strict=True)],
            "%",
            goal,
            detail=detail,
        )
        for name, without, kind, goal in (
            ("step trace: processor time added to a step of 10 ms, weights each 10 steps", "off", "on", GOAL_TRACE),
            ("no step trace: processor time added to the same step, against bare", "bare", "off", None),
        )
    ]


@contextlib.contextmanager
def _environment(directory: Path, *, traced: bool) -> Iterator[None]:
    if traced:
        os.environ["RESUME_ADAPTERS_TRACE"] = str(directory / "steps.jsonl")
    try:
        yield
    finally:
        os.environ.pop("RESUME_ADAPTERS_TRACE", None)


def _run(directory: Path, with_package: bool) -> dict[str, list[float]]:
    command = [sys.executable, "-m", "benchmarks.loops", str(directory), *["--with-package"] * with_package]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    record: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return record


class _Loop:
    """A loop of steps of a stack of linear layers, with or without the package."""

    def __init__(
        self, directory: Path, width: int, layers: int, save_every: int, with_package: bool, batch: int = 1
    ) -> None:
        import torch
        from accelerate import Accelerator

        from benchmarks.stack import Rows, Stack
        from resume_adapters.accelerate import register_for_resume

        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.accelerator = Accelerator(cpu=True)
        model = Stack(width, layers)
        optimizer = torch.optim.AdamW(model.parameters())
        rows = torch.utils.data.DataLoader(Rows(width), batch_size=batch)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, rows)
        self.run: Any = (
            register_for_resume(self.accelerator, run_dir=directory, save_every=save_every, stage="memory")
            if with_package
            else None
        )

    def __iter__(self) -> Iterator[None]:
        """Train, yielding after each step."""
        for _ in range(1) if self.run is None else self.run.epochs(1):
            for batch in self.loader if self.run is None else self.run.batches(self.loader):
                with self.accelerator.accumulate(self.model):
                    loss = self.model(batch["inputs"])["loss"]
                    self.accelerator.backward(loss)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                if self.run is not None:
                    self.run.step(loss=loss)
                yield


def _steps(
    directory: Path, with_package: bool, width: int = 16, layers: int = 1, batch: int = 1
) -> Generator[float, None, None]:
    loop = _Loop(directory, width=width, layers=layers, save_every=10**9, with_package=with_package, batch=batch)
    steps = iter(loop)
    next(steps)
    try:
        while True:
            begun = time.thread_time()
            next(steps)
            yield time.thread_time() - begun
    finally:
        if loop.run is not None:
            loop.run._run.close()


def saves(directory: Path, with_package: bool) -> dict[str, list[float]]:
    """Save after every step; return seconds blocked and seconds until the checkpoint is safe, for each save."""
    from benchmarks import training

    loop = _Loop(directory, WIDTH["save"], layers=4, save_every=1, with_package=with_package)
    record: dict[str, list[float]] = {"blocked": [], "safe": []}
    steps = iter(loop)
    next(steps)
    for number in range(1, SAVES + 2):
        checkpoint = directory / f"checkpoint_{number}"
        begun = time.perf_counter()
        if with_package:
            loop.run._end_of_body()  # what asking for the next batch begins with
        else:
            loop.accelerator.save_state(str(checkpoint))
        record["blocked"].append(time.perf_counter() - begun)
        if with_package:
            loop.run._run.saver.flush()
        else:
            training.sync_tree(checkpoint)
        record["safe"].append(time.perf_counter() - begun)
        shutil.rmtree(checkpoint)
        os.sync()
        next(steps)
    return {name: values[1:] for name, values in record.items()}


def main() -> None:
    """Run the job that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--with-package", action="store_true")
    parser.add_argument("--steps", action="store_true")
    given = parser.parse_args()
    if given.steps:
        serve(_steps(given.directory, given.with_package))
        return
    print(json.dumps(saves(given.directory, given.with_package)), flush=True)
    os._exit(0)  # in the middle of an epoch: there is nothing to finish


if __name__ == "__main__":
    main()
