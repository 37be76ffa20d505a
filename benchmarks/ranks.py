"""What saves take from a training on several ranks: 200 steps with ten of them, against the same steps without.

``python -m benchmarks.ranks DIRECTORY RANK WORLD_SIZE STEPS SAVES`` is one rank; its last line is the time it took.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import figure
from benchmarks.figure import Figure
from benchmarks.staged import Content

GOAL = 1.05
_WIDTH, _LAYERS, _BATCH = 1024, 8, 64
"""A model of 8 million parameters: with AdamW, a save of 100 MB."""

_STEPS, _SAVES, _WARM_UP = 200, 10, 5
_RANKS = (1, 2, 4)


def measure(rounds: int) -> list[Figure]:
    """Return the time of a training with saves, from its first step to its last commit, as a ratio to one without."""
    figures = []
    for ranks in _RANKS:
        pairs = [(_run(ranks, 0), _run(ranks, _SAVES)) for _ in range(rounds)]
        bare = figure.median([without for without, _ in pairs])
        figures.append(
            figure.of(
                f"{_STEPS} steps with {_SAVES} saves of 100 MB, {ranks} rank{'s' * (ranks > 1)}, against no saves",
                [with_saves / without for without, with_saves in pairs],
                "x",
                GOAL,
                detail=f"without saves they take {bare:.1f} s; load {os.getloadavg()[0]:.0f}",
            )
        )
    return figures


def _run(ranks: int, saves: int, steps: int = _STEPS) -> float:
    with tempfile.TemporaryDirectory() as directory:
        jobs = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.ranks", directory, *map(str, (rank, ranks, steps, saves))],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        done = [(job, *job.communicate()) for job in jobs]
    for job, _, errors in done:
        if job.returncode:
            raise RuntimeError(f"{job.args!r} failed:\n{errors}")
    return float(done[0][1].splitlines()[-1])


class _ContentOfRanks(Content):
    """What the ranks save together: rank zero writes, as it does with DDP."""

    def __init__(self, state: Any, rank: int) -> None:
        super().__init__(state)
        self._rank = rank

    def save(self, directory: Path) -> None:
        if self._rank == 0:
            super().save(directory)


def _train(directory: Path, rank: int, world_size: int, steps: int, saves: int) -> float:
    import torch
    import torch.distributed as dist

    from resume_adapters import KeepLast
    from resume_adapters.core.run.context import RunOptions
    from resume_adapters.core.run.run import ResumableRun
    from resume_adapters.core.saving.staging import StagingOptions

    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world_size)
    layers = [torch.nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(_LAYERS)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    rows = torch.randn(_BATCH, _WIDTH)
    content = _ContentOfRanks(lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, rank)
    run = ResumableRun(directory / "run", RunOptions(keep=KeepLast(2), staging=StagingOptions("memory")))
    run.open()
    began = 0.0
    for step in range(_WARM_UP + steps):
        if step == _WARM_UP:
            dist.barrier()
            began = time.perf_counter()
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()
        number = step + 1 - _WARM_UP
        if saves and number > 0 and number % (steps // saves) == 0:
            run.saver.save(f"checkpoint-{number}", number, content)
    run.saver.flush()
    dist.barrier()
    seconds = time.perf_counter() - began
    run.close()
    dist.destroy_process_group()
    return seconds


def main() -> None:
    """Run the rank that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    for name in ("rank", "world_size", "steps", "saves"):
        parser.add_argument(name, type=int)
    given = parser.parse_args()
    seconds = _train(given.directory, given.rank, given.world_size, given.steps, given.saves)
    print(f"\n{seconds}", flush=True)


if __name__ == "__main__":
    main()
