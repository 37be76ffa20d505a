"""Time that the callback adds to an optimizer step.

Two trainings, one bare and one with the callback, take turns of some steps, in two threads of one process, one of
which always waits. So both see the same noise, and each pair of neighbouring turns gives one difference. The main
figure is the processor time of the training thread, because the callback never waits there; wall time also includes
other programs and loader workers.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks import figure, training
from benchmarks.figure import Figure
from benchmarks.turns import ROUND, WARM_UP, means_of_turns, on_one_processor, run_together

GOAL_MICROSECONDS = 200


class Turns:
    """Lets threads run one at a time; each runs until it passes the turn on.

    Args:
        count: how many threads take turns.
    """

    def __init__(self, count: int) -> None:
        self._gates = [threading.Semaphore(int(index == 0)) for index in range(count)]

    def wait(self, which: int) -> None:
        """Return when it is this thread's turn."""
        self._gates[which].acquire()

    def pass_on(self, which: int) -> None:
        """Let the next thread run."""
        self._gates[(which + 1) % len(self._gates)].release()


class StepClock(training.Clock):
    """Times each step, and passes the turn on after some."""

    def __init__(self, turns: Turns, which: int) -> None:
        super().__init__()
        self.times: list[tuple[float, float]] = []
        self._turns = turns
        self._which = which
        self._begun = (0.0, 0.0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        processor, wall = _now()
        self.times.append((processor - self._begun[0], wall - self._begun[1]))
        super().on_step_end(args, state, control, **kwargs)
        if len(self.times) % ROUND == 0:
            self._turns.pass_on(self._which)
            self._turns.wait(self._which)
        self._begun = _now()


def _now() -> tuple[float, float]:
    return time.thread_time(), time.perf_counter()


def measure(steps: int) -> list[Figure]:
    """Return the added time per step, without workers and with two, on the processor and by the wall clock."""
    found = []
    for workers in (0, 2):
        bare, with_callback = _take_turns(steps, workers)
        for clock, what, goal in (
            (0, "processor time", GOAL_MICROSECONDS),
            (1, "wall time", None),
        ):
            less, more = (means_of_turns([step[clock] * 1e6 for step in each]) for each in (bare, with_callback))
            found.append(
                figure.of(
                    f"{what} added per step, {workers} loader workers",
                    [one - other for one, other in zip(more, less, strict=True)],
                    "us",
                    goal,
                    detail=f"{len(less)} pairs of {ROUND} steps; a bare one takes {figure.median(less):.0f} us",
                )
            )
    return found


def _take_turns(steps: int, workers: int) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    turns = Turns(2)
    clocks = [StepClock(turns, 0), StepClock(turns, 1)]
    with contextlib.nullcontext() if workers else on_one_processor():
        run_together(lambda which: _train(turns, which, steps, workers, clocks[which]))
    bare, with_callback = ([*clock.times[WARM_UP:]] for clock in clocks)
    return bare, with_callback


def _train(turns: Turns, which: int, steps: int, workers: int, clock: StepClock) -> None:
    turns.wait(which)
    try:
        with tempfile.TemporaryDirectory() as directory:
            callbacks = training.callbacks(which == 1, clock)
            training.trainer(
                Path(directory), width=16, layers=1, steps=steps, workers=workers, callbacks=callbacks
            ).train()
    finally:
        turns.pass_on(which)
