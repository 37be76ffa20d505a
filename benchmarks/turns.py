"""Trainings in processes of their own that take turns: a step each, so that neighbours see the same noise."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence

WARM_UP = 50
"""Steps of each that do not count."""


def taking_turns(jobs: Sequence[Sequence[str]], steps: int) -> list[list[float]]:
    """Return how long each step of each job takes, in seconds.

    Args:
        jobs: of each, the arguments for Python; it calls :func:`serve`.
        steps: how many are measured.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, *job], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
            )
            for job in jobs
        ]
        rounds = [[_step(each) for each in started] for _ in range(WARM_UP + steps)]
        for each in started:
            each.kill()  # in the middle of an epoch: there is nothing to finish
    return [list(of_job) for of_job in zip(*rounds[WARM_UP:], strict=True)]


def _step(job: subprocess.Popen[str]) -> float:
    assert job.stdin is not None and job.stdout is not None
    print(file=job.stdin, flush=True)
    for line in job.stdout:
        if line.startswith(_MARK):
            return float(line.removeprefix(_MARK))
    raise RuntimeError(f"{job.args!r} has ended before it was asked to")


_MARK = "step took "


def serve(steps: Iterator[float]) -> None:
    """Do a step for each line of the standard input, and print how long it took."""
    for _ in sys.stdin:
        print(f"{_MARK}{next(steps)}", flush=True)
