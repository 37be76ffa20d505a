"""A save that is copied and written in the background, against ``torch.save``: without a framework, in one process.

``python -m benchmarks.staged WIDTH LAYERS SAVES KIND`` is one job; its last line is a JSON record.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import figure
from benchmarks.figure import Figure

_STEPS = 4
"""Steps after a save that are measured with it."""

_WARM_UP = 3
"""Saves of a launch that are written at once, or copied before they return."""

GOAL_CALL, GOAL_TRAINING, GOAL_SAFE, GOAL_MEGABYTES = 0.02, 0.2, 1.15, 64


def measure(rounds: int) -> list[Figure]:
    """Return what a save of 0.5 GB costs the training, until when it is safe, and the memory that it takes."""
    records: dict[str, dict[str, list[float]]] = {"bare": {}, "memory": {}}
    for _ in range(rounds):
        for kind, record in records.items():
            for name, values in run(1500, 18, 8, kind).items():
                record.setdefault(name, []).extend(values)
    bare, ours = records["bare"], records["memory"]
    size = 1500 * 1500 * 4 * 18 * 3 / 1e6
    rows = (
        ("the call", "call", GOAL_CALL, "torch.save"),
        ("processor time of the call", "processor", GOAL_CALL, "torch.save"),
        (f"the call, and what it adds to the next {_STEPS} steps", "training", GOAL_TRAINING, "torch.save"),
        ("until committed", "safe", GOAL_SAFE, "torch.save with fsync"),
    )
    found = [
        figure.of(
            f"500 MB save with stage=memory: {what}, against {against}",
            [seconds / figure.median(bare[name]) for seconds in ours[name]],
            "x",
            goal,
            detail=f"{against} takes {figure.median(bare[name]):.3f} s; load {os.getloadavg()[0]:.0f}",
        )
        for what, name, goal, against in rows
    ]
    added = figure.median(ours["peak"]) - figure.median(bare["peak"]) - size
    many = run(64, 1000, 5, "memory", descriptors=1024)
    return [
        *found,
        figure.of("500 MB save with stage=memory: peak memory, beyond one copy", [added], "MB", GOAL_MEGABYTES),
        figure.of("3,000 tensors, ulimit -n 1024: the call", [1e3 * each for each in many["call"]], "ms"),
    ]


def run(width: int, layers: int, saves: int, kind: str, descriptors: int | None = None) -> dict[str, list[float]]:
    """Run a job in a new process and return its record."""
    command = [sys.executable, "-m", "benchmarks.staged", *map(str, (width, layers, saves, kind))]
    limit = [] if descriptors is None else ["bash", "-c", f'ulimit -n {descriptors} && exec "$@"', "bash"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*limit, *command], capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    record: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return record


class _Content:
    """What a checkpoint is to hold: one file of ``torch.save``."""

    def __init__(self, state: Callable[[], Mapping[str, Any]]) -> None:
        self._state = state

    def save(self, directory: Path) -> None:
        import torch

        torch.save(self._state(), directory / "state.pt")

    def rank_state(self) -> dict[str, Any]:
        return {}

    def parts(self) -> dict[str, Any]:
        return {}

    def describe(self, rank_state: Mapping[str, Any]) -> dict[str, Any]:
        return {"epoch": 0.0, "reason": "scheduled"}

    def owner_of(self, file: Path) -> int:
        return 0


def _job(width: int, layers: int, saves: int, kind: str, directory: Path) -> dict[str, list[float]]:
    import torch

    from resume_adapters import KeepLast
    from resume_adapters.core.run.run import ResumableRun
    from resume_adapters.core.staging.staging import StagingOptions

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    content = _Content(lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    options = StagingOptions("memory", optimizers=lambda: [optimizer])
    run = ResumableRun(directory, keep=KeepLast(1), staging=options)
    run.open()
    rows = torch.randn(8, width)

    def step() -> float:
        began = time.perf_counter()
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()
        return time.perf_counter() - began

    def save(number: int) -> None:
        if kind == "memory":
            run.save(f"checkpoint-{number}", number, content)
        else:
            content.save(directory)

    def finish() -> None:
        if kind == "memory":
            run.flush()
        else:
            with open(directory / "state.pt", "rb") as file:
                os.fsync(file.fileno())

    record: dict[str, list[float]] = {"call": [], "processor": [], "training": [], "safe": []}
    for number in itertools.count(1):
        if number > _WARM_UP + 2 * saves:
            break
        os.sync()
        usual = statistics.median(step() for _ in range(_STEPS))
        began, processor = time.perf_counter(), time.thread_time()
        save(number)
        call, processor = time.perf_counter() - began, time.thread_time() - processor
        waits = number % 2  # either for the commit, or for the next steps
        steps = 0.0 if waits else sum(step() for _ in range(_STEPS))
        finish()
        if number > _WARM_UP and waits:
            record["safe"].append(time.perf_counter() - began)
        elif number > _WARM_UP:
            for name, value in (("call", call), ("processor", processor), ("training", call + steps - _STEPS * usual)):
                record[name].append(value)
    assert kind == "bare" or run.engine.last_committed == _WARM_UP + 2 * saves
    run.close()
    record["peak"] = [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 * 1.048576]
    return record


def main() -> None:
    """Run the job that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("width", "layers", "saves"):
        parser.add_argument(name, type=int)
    parser.add_argument("kind", choices=("bare", "memory"))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(sys.stderr):
        record = _job(given.width, given.layers, given.saves, given.kind, Path(directory))
    print(json.dumps(record))


if __name__ == "__main__":
    main()
