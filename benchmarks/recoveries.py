"""What a restartable block costs: seconds from a failure to the step done again, and time added to each step.

``torchrun --nproc-per-node 2 -m benchmarks.recoveries DIRECTORY FAILURES [--kill] [--threads]`` is the job that fails.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from benchmarks import figure
from benchmarks.figure import Figure
from benchmarks.loops import _Loop, _steps

GOAL_SECONDS = 0.5
GOAL_PROCESS = 2.0
GOAL_MICROSECONDS = 20
_ROUND = 50
_APART = 4
"""Steps between two failures."""

_KILLS = 5
"""Processes that are killed at most, of each number of ranks."""


def measure(rounds: int) -> list[Figure]:
    """Return the seconds to recover from an exception and from SIGKILL, and the processor time added per step."""
    found = _recoveries(rounds, ranks=2)
    load = f"load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores"
    return [
        figure.of(
            "restartable, 2 ranks: from an exception to the end of the step done again",
            found,
            "s",
            GOAL_SECONDS,
            detail=f"{rounds} exceptions in the forward pass; {load}",
        ),
        *(each for ranks in (2, 3) for each in _deaths(ranks, min(rounds, _KILLS), load)),
        *_per_step(rounds),
    ]


def _deaths(ranks: int, rounds: int, load: str) -> list[Figure]:
    """Return the seconds from SIGKILL to the end of the step done again, whoever starts the next processes."""
    what = f"restartable, {ranks} ranks: from SIGKILL to the end of the step done again"
    forked = _recoveries(rounds, ranks, "--kill")
    started = _recoveries(rounds, ranks, "--kill", "--threads")
    return [
        figure.of(what, forked, "s", GOAL_PROCESS, detail=f"{rounds} kills; {load}"),
        figure.of(f"{what}, in processes that torchrun starts", started, "s", None, detail=load),
    ]


def _recoveries(rounds: int, ranks: int, *options: str) -> list[float]:
    """Return the seconds of each recovery of a job that fails."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]
        command += ["--max-restarts", str(rounds), "-m", "benchmarks.recoveries", name, str(rounds), *options]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
        lines = (directory / ".resume" / "journal.jsonl").read_text().splitlines()
    found = [each for each in map(json.loads, lines) if each["event"] == "recovery"]
    level = "process" if options else "memory"
    assert len(found) == rounds and all(each["level"] == level and not each["lost"] for each in found), found
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


def fail_again_and_again(directory: Path, failures: int, *, is_killed: bool) -> None:
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
                if rank == (step // _APART) % ranks and not is_killed:
                    raise RuntimeError(f"at step {step}")
                if rank == (step // _APART) % ranks and _is_first(directory / f"killed.{step}"):
                    os.kill(os.getpid(), signal.SIGKILL)

        torch.nn.Module.register_forward_pre_hook(loop.model, fail)
        for _ in loop:
            if loop.run.global_step >= _APART * (failures + 1):
                break

    main()


def _is_first(mark: Path) -> bool:
    """Return whether no process before this one has died here."""
    with contextlib.suppress(FileExistsError):
        mark.touch(exist_ok=False)
        return True
    return False


def main() -> None:
    """Run the job that fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("failures", type=int)
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--threads", action="store_true", help="with a thread, so that torchrun alone starts processes")
    given = parser.parse_args()
    if given.threads:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    fail_again_and_again(given.directory, given.failures, is_killed=given.kill)


if __name__ == "__main__":
    main()
