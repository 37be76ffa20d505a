"""A training job in a process of its own: ``python -m benchmarks.job KIND DIRECTORY [--with-callback]``.

The last line it prints is a JSON record of what it measured.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SAVES = 8
"""Saves that one job measures, after one that warms up."""

WIDTH = {"save": 3233, "memory": 2500}
"""Four layers of this width: a checkpoint of 500 MB (weights and two moments), a model of 100 MB."""


def run(kind: str, directory: Path, with_callback: bool, *, resume: bool = False) -> dict[str, Any]:
    """Run a job in a new process and return its record."""
    flags = ["--with-callback"] * with_callback + ["--resume"] * resume
    command = [sys.executable, "-m", "benchmarks.job", kind, str(directory), *flags]
    # glibc moves this threshold while a job runs, unless it is fixed; the peak then varies by 200 MB.
    malloc = {"MALLOC_MMAP_THRESHOLD_": "65536"} if kind == "memory" else {}
    environment = {**os.environ, **malloc, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    record: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return record


def saves(directory: Path, with_callback: bool) -> dict[str, list[float]]:
    """Save at every step; return seconds blocked and seconds until the checkpoint is safe, for each save."""
    from benchmarks import training

    safe: list[float] = []

    def finish(checkpoint: Path) -> None:
        if with_callback:
            callbacks[0].session.run.saver.flush()  # type: ignore[attr-defined]
        else:
            training.sync_tree(checkpoint)
        safe.append(time.perf_counter() - clock.steps[-1])
        # Flush the disk's queue, so that one save cannot slow the next.
        shutil.rmtree(checkpoint)
        os.sync()

    clock = training.Clock(after_save=finish)
    callbacks = training.callbacks(with_callback, clock)
    # One more step than is measured: the end of the training needs its last checkpoint.
    _trainer(kind="save", directory=directory, steps=SAVES + 1, callbacks=callbacks).train()
    return {"blocked": clock.saves[1:], "safe": safe[1:]}


def memory(directory: Path, with_callback: bool, resume: bool) -> dict[str, float]:
    """Train with a save at every other step, or resume; return the peak memory in megabytes."""
    from benchmarks import training

    callbacks = training.callbacks(with_callback, training.Clock())
    job = _trainer(kind="memory", directory=directory, steps=8 if resume else 4, save_every=2, callbacks=callbacks)
    job.train(resume_from_checkpoint=True if resume and not with_callback else None)
    assert job.state.global_step == job.args.max_steps
    return {"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def _trainer(kind: str, directory: Path, steps: int, callbacks: Any, save_every: int = 1) -> Any:
    from benchmarks import training

    return training.trainer(
        directory, width=WIDTH[kind], layers=4, steps=steps, save_every=save_every, callbacks=callbacks
    )


def main() -> None:
    """Run the job that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=list(WIDTH))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--with-callback", action="store_true")
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args()
    if given.kind == "save":
        record: dict[str, Any] = saves(given.directory, given.with_callback)
    else:
        record = memory(given.directory, given.with_callback, given.resume)
    print(json.dumps(record))


if __name__ == "__main__":
    main()
