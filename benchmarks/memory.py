"""Peak memory that the callback adds for a 100 MB model, while saving and in a resume. Each job is a process."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks import figure, job
from benchmarks.figure import Figure

GOAL_MEGABYTES = 64


def measure(repeats: int) -> list[Figure]:
    """Return the peak with the callback minus the bare peak, for a run from the start and for a resumed one."""
    found = []
    rounds = [(_peaks(False), _peaks(True)) for _ in range(repeats)]
    for index, what in enumerate(("training and saving", "resuming")):
        bare = figure.median([without[index] for without, _ in rounds])
        found.append(
            figure.of(
                f"peak memory added, {what}",
                [with_callback[index] - without[index] for without, with_callback in rounds],
                "MB",
                GOAL_MEGABYTES,
                detail=f"a model of 100 MB with AdamW; bare {bare:.0f} MB",
            )
        )
    return found


def _peaks(with_callback: bool) -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as directory:
        first = job.run("memory", Path(directory), with_callback)
        second = job.run("memory", Path(directory), with_callback, resume=True)
    return first["peak"], second["peak"]
