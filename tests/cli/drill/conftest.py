"""Traces made by hand: what a run of a small model would have traced."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

from resume_adapters.cli.drill.job import LaunchTrace, Run


class Traces:
    """Makes traces of one run: the same step has the same values in every launch."""

    def step(self, step: int, rank: int = 0) -> dict[str, Any]:
        """What a rank traces of a step with two micro-batches."""
        rng = random.Random(step * 100 + rank)
        digests = [f"{rng.getrandbits(64):016x}" for _ in range(7)]
        return {
            "event": "step",
            "time": float(step),
            "rank": rank,
            "step": step,
            "epoch": step / 10,
            "batches": digests[:2],
            "rng": {"python": digests[2], "numpy": digests[3], "torch": digests[4]},
            "loss": [rng.random().hex(), rng.random().hex()],
            "grad_norm": rng.random().hex(),
            "lr": [[(1 / step).hex()]],
            "weights": digests[5],
            "optimizer": digests[6],
        }

    def launch(self, number: int, steps: range, *, ranks: int = 1, **facts: Any) -> LaunchTrace:
        """A launch that did these steps, resumed from the step before them."""
        events = []
        for rank in range(ranks):
            start = {"event": "start", "time": 0.0, "rank": rank, "pid": 100 + rank, "world_size": ranks}
            events.append({**start, "step": steps.start - 1, "missing": [], **facts})
            events += [self.step(step, rank) for step in steps]
        return LaunchTrace(number, tuple(events))

    def run(self, *segments: range, ranks: int = 1, **facts: Any) -> Run:
        """A run of several launches."""
        launches = (self.launch(number, steps, ranks=ranks, **facts) for number, steps in enumerate(segments, start=1))
        return Run(tuple(launches))

    def altered(self, run: Run, launch: int, step: int, rank: int = 0, **values: Any) -> Run:
        """The same run with other values of one step; a value may be a function of the old one."""
        changed = copy.deepcopy(run)
        for event in changed.launches[launch - 1].of("step"):
            if (event["step"], event["rank"]) == (step, rank):
                for name, value in values.items():
                    event[name] = value(event[name]) if callable(value) else value
        return changed


@pytest.fixture
def traces() -> Traces:
    return Traces()
