"""Time to find the latest valid among 1,000 checkpoints. They are small, so that digests do not dominate."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from benchmarks import figure
from benchmarks.figure import Figure
from resume_adapters.core.ranks import Alone
from resume_adapters.core.resolve import latest_valid
from resume_adapters.core.run import ResumableRun, no_foreign
from resume_adapters.core.state import Value
from resume_adapters.core.storage import LocalStorage

GOAL_MILLISECONDS = 50
_COUNT = 1_000


class Unsynced(LocalStorage):
    """A local disk that is not waited for: what is measured is reading."""

    def sync(self, path: Path) -> None:
        return None


def measure(repeats: int) -> list[Figure]:
    """Return the time to resolve, and the time of a whole start."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        _fill(directory)
        resolving, starting = [], []
        for _ in range(repeats):
            resolving.append(_resolve(directory))
            starting.append(_start(directory))
    return [
        figure.of(
            f"latest valid among {_COUNT:,} checkpoints",
            resolving,
            "ms",
            GOAL_MILLISECONDS,
            detail="the newest is valid",
        ),
        figure.of(f"a whole start among {_COUNT:,} checkpoints", starting, "ms", detail="resolve, sweep, take over"),
    ]


def _fill(directory: Path) -> None:
    run = ResumableRun(directory, ranks=Alone(), storage=Unsynced())
    run.open()
    for step in range(1, _COUNT + 1):
        run.save(
            f"checkpoint-{step}",
            step,
            native=lambda: None,
            own=lambda: {"position": 0},
            parts={"counters": Value({"step": step})},
            owner=lambda file: 0,
            facts=lambda: {"epoch": 0.0, "reason": "scheduled"},
        )
    run.flush()
    run.close()


def _resolve(directory: Path) -> float:
    begun = time.perf_counter()
    choice = latest_valid(LocalStorage(), Alone(), directory, no_foreign)
    taken = time.perf_counter() - begun
    assert choice.checkpoint is not None
    assert choice.checkpoint.step == _COUNT
    return taken * 1e3


def _start(directory: Path) -> float:
    begun = time.perf_counter()
    run = ResumableRun(directory, ranks=Alone())
    run.open()
    taken = time.perf_counter() - begun
    run.close()
    return taken * 1e3
