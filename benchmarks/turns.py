"""Trainings in processes of their own that take turns: some steps each, so that neighbours see the same noise."""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

ROUND = 20
"""Steps in a turn. The caches are then as warm as in a training that has the processor to itself."""

WARM_UP = 60
"""Steps of each that do not count."""


@contextlib.contextmanager
def on_one_processor() -> Iterator[None]:
    """Let this thread, and the threads and processes that it starts, use one processor while the context lasts.

    Only one of those that take turns runs at a time. On two processors, of which other machines may use the other
    half, the same steps differ by a tenth, which is more than what is looked for.
    """
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def run_together(train: Callable[[int], object]) -> None:
    """Run two trainings, by their numbers, in threads of this process; they take turns by themselves."""
    threads = [threading.Thread(target=train, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def means_of_turns(seconds: Sequence[float]) -> list[float]:
    """Return how long a step takes in each turn of a training, from how long each step takes."""
    return [statistics.mean(turn) for turn in zip(*[iter(seconds)] * ROUND, strict=False)]


def taking_turns(jobs: Sequence[Sequence[str]], steps: int) -> list[list[float]]:
    """Return how long a step takes in each turn of each job, in seconds.

    Args:
        jobs: of each, the arguments for Python; it calls :func:`serve`.
        steps: how many are measured.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with on_one_processor(), contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, *job], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
            )
            for job in jobs
        ]
        turns = [[_turn(each) for each in started] for _ in range((WARM_UP + steps) // ROUND)]
        for each in started:
            each.kill()  # in the middle of an epoch: there is nothing to finish
    return [list(of_job) for of_job in zip(*turns[WARM_UP // ROUND :], strict=True)]


def _turn(job: subprocess.Popen[str]) -> float:
    assert job.stdin is not None and job.stdout is not None
    print(file=job.stdin, flush=True)
    for line in job.stdout:
        if line.startswith(_MARK):
            return float(line.removeprefix(_MARK))
    raise RuntimeError(f"{job.args!r} has ended before it was asked to")


_MARK = "step took "


def serve(steps: Iterator[float]) -> None:
    """Do the steps of a turn for each line of the standard input, and print how long one took."""
    for _ in sys.stdin:
        print(f"{_MARK}{statistics.mean(itertools.islice(steps, ROUND))}", flush=True)
