"""Wall time of a 500 MB save with its commit, against a bare save. The jobs alternate on one disk."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks import figure, job
from benchmarks.figure import Figure

GOAL_BLOCKED, GOAL_RATIO = 0.3, 1.15


def measure(rounds: int) -> list[Figure]:
    """Return how long the training thread is blocked and how long until the checkpoint is safe, as ratios to bare."""
    blocked: dict[bool, list[float]] = {False: [], True: []}
    safe: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds):
        for with_callback in (False, True):
            with tempfile.TemporaryDirectory() as directory:
                record = job.run("save", Path(directory), with_callback)
            blocked[with_callback] += record["blocked"]
            safe[with_callback] += record["safe"]
    bare, bare_synced = figure.median(blocked[False]), figure.median(safe[False])
    return [
        figure.of(
            "500 MB save: training blocked, against a bare save",
            [seconds / bare for seconds in blocked[True]],
            "x",
            GOAL_BLOCKED,
            detail=f"a bare save takes {bare:.2f} s; nothing of it is forced onto the disk",
        ),
        figure.of(
            "500 MB save: until committed, against a bare save with fsync",
            [seconds / bare_synced for seconds in safe[True]],
            "x",
            GOAL_RATIO,
            detail=f"a bare save with fsync takes {bare_synced:.2f} s",
        ),
        figure.of(
            "500 MB save: until committed, against a bare save without fsync",
            [seconds / bare for seconds in safe[True]],
            "x",
            detail="the background's work, for scale: most of it is the disk's",
        ),
    ]
