"""Time that each step spends in ``end_step``, in which every adapter asks whether to save or to stop.

On one rank the call checks a flag and the clock. On two, the ranks vote over gloo, and read the vote one step later;
their steps take 10 ms and end, as real ones do, with a reduction in which they wait for each other. The figure is the
wall time of the call, including what it waits for.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import figure
from benchmarks.figure import Figure
from resume_adapters.core.ranks import Ranks, SingleProcess, current_ranks
from resume_adapters.core.run.context import RunOptions
from resume_adapters.core.run.run import ResumableRun
from resume_adapters.core.saving.cadence import Cadence

GOAL_MICROSECONDS = 5
GOAL_PERCENT = 1
_RANKS = 2
_STEP_SECONDS = 0.01
_IN_A_ROW = {1: 1000, _RANKS: 20}
"""Steps that give one measurement: of the calls on one rank, each is shorter than the clock's own cost."""


def measure(repeats: int) -> list[Figure]:
    """Return the time of a call on one rank, and its share of a step on two."""
    with tempfile.TemporaryDirectory() as directory:
        calls = _in_microseconds(
            ResumableRun(Path(directory), RunOptions(cadence=Cadence(10**9)), ranks=SingleProcess()), repeats
        )
        shares = _on_two_ranks(Path(directory), repeats)
    return [
        figure.of("asking whether to stop, one rank", calls, "us", GOAL_MICROSECONDS, detail="mean of 1000 steps each"),
        figure.of(
            "asking whether to stop, two ranks",
            shares,
            "%",
            GOAL_PERCENT,
            detail="of steps of 10 ms over gloo; mean of 20 steps each",
        ),
    ]


def _in_microseconds(run: ResumableRun, repeats: int) -> list[float]:
    run.open()
    run.begin(0, 0.0)
    found, step = [], 0
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(_IN_A_ROW[1]):
            step += 1
            run.steps.end_step(step, 0.0)
        found.append((time.perf_counter() - began) / _IN_A_ROW[1] * 1e6)
    run.close()
    return found


def _on_two_ranks(directory: Path, repeats: int) -> list[float]:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.asking", str(directory), str(rank), str(repeats)],
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(_RANKS)
    ]
    printed = [rank.communicate()[0] for rank in ranks]
    found: list[float] = json.loads(printed[0])
    return found


def _shares(run: ResumableRun, repeats: int) -> list[float]:
    """Return the percentage of the step time that the calls took, for each series of steps."""
    import torch
    import torch.distributed as dist

    run.open()
    run.begin(0, 0.0)
    gradient, found, step = torch.ones(1000), [], 0
    for _ in range(repeats):
        asking, began = 0.0, time.perf_counter()
        for _ in range(_IN_A_ROW[_RANKS]):
            step += 1
            time.sleep(_STEP_SECONDS)
            dist.all_reduce(gradient)
            before = time.perf_counter()
            run.steps.end_step(step, 0.0)
            asking += time.perf_counter() - before
        found.append(asking / (time.perf_counter() - began) * 100)
    run.close()
    return found


def _main(directory: str, rank: str, repeats: str) -> None:
    import torch.distributed as dist

    store = f"file://{directory}/store"
    dist.init_process_group("gloo", init_method=store, rank=int(rank), world_size=_RANKS)
    ranks: Ranks = current_ranks()
    shares = _shares(
        ResumableRun(Path(directory) / "together", RunOptions(cadence=Cadence(10**9)), ranks=ranks), int(repeats)
    )
    print(json.dumps(shares))
    dist.barrier()


if __name__ == "__main__":
    _main(*sys.argv[1:])
