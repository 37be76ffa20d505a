"""What a restartable block costs: seconds from a failure to the step done again, and time added to each step.

``torchrun --nproc-per-node 2 -m benchmarks.recoveries DIRECTORY FAILURES`` is the job that fails.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import figure
from benchmarks.figure import Figure
from benchmarks.loops import _Loop, _steps

GOAL_SECONDS = 0.5
GOAL_MICROSECONDS = 200
_ROUND = 50
_APART = 4
"""Steps between two failures."""


def measure(rounds: int) -> list[Figure]:
    """Return the seconds to recover from an exception, and the processor time added per step."""
    found = _recoveries(rounds)
    load = f"load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores"
    return [
        figure.of(
            "restartable, 2 ranks: from an exception to the end of the step done again",
            found,
            "s",
            GOAL_SECONDS,
            detail=f"{rounds} exceptions in the forward pass; {load}",
        ),
        *_per_step(rounds),
    ]


def _recoveries(rounds: int) -> list[float]:
    """Return the seconds of each recovery of a job that fails."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
        command += ["-m", "benchmarks.recoveries", name, str(rounds)]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
        lines = (directory / ".resume" / "journal.jsonl").read_text().splitlines()
    found = [each for each in map(json.loads, lines) if each["event"] == "recovery"]
    assert len(found) == rounds and all(each["level"] == "memory" and not each["lost"] for each in found), found
    return [each["seconds"] for each in found]


def _per_step(rounds: int) -> list[Figure]:
    """Return the processor time added per step."""
    bare, held = ([_seconds(within_block) for _ in range(rounds)] for within_block in (False, True))
    return [
        figure.of(
            "restartable, Accelerate loop: processor time added per step",
            [(more - less) * 1e6 for less, more in zip(bare, held, strict=True)],
            "us",
            GOAL_MICROSECONDS,
            detail=f"{rounds} rounds of {_ROUND} steps; without it one takes {figure.median(bare) * 1e6:.0f} us",
        ),
    ]


def _seconds(within_block: bool) -> float:
    """Return the processor time of a step of a loop that resumes, within a restartable block or not."""
    from resume_adapters.recovery import Attempt, restartable

    def steps(attempt: Attempt | None = None) -> float:
        with tempfile.TemporaryDirectory() as directory:
            found = _steps(Path(directory), with_package=True)
            seconds = [next(found) for _ in range(2 * _ROUND)][_ROUND:]
            found.close()
        return statistics.median(seconds)

    return restartable()(steps)() if within_block else steps()


def fail_again_and_again(directory: Path, failures: int) -> None:
    """Train on several ranks; in turn, one fails in its forward pass."""
    import accelerate  # noqa: F401  # as scripts do, before all else
    import torch

    import resume_adapters.accelerate  # noqa: F401
    from resume_adapters.recovery import Attempt, restartable

    left = [_APART * (number + 1) for number in range(failures)]

    @restartable(max_restarts=failures)
    def main(attempt: Attempt) -> None:
        loop = _Loop(directory, width=64, layers=2, save_every=10**9, with_package=True)
        rank, ranks = loop.accelerator.process_index, loop.accelerator.num_processes

        def fail(module: Any, given: Any) -> None:
            step = loop.run.global_step
            if step in left:
                left.remove(step)
                if rank == (step // _APART) % ranks:
                    raise RuntimeError(f"at step {step}")

        torch.nn.Module.register_forward_pre_hook(loop.model, fail)
        for _ in loop:
            if loop.run.global_step >= _APART * (failures + 1):
                break

    main()


def main() -> None:
    """Run the job that fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("failures", type=int)
    given = parser.parse_args()
    fail_again_and_again(given.directory, given.failures)


if __name__ == "__main__":
    main()
