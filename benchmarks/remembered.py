"""A save to memory against one to the disk, and a resume from memory against one from the disk; the core alone."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from benchmarks import figure
from benchmarks.content import SmallContent
from benchmarks.figure import Figure
from resume_adapters import Memory
from resume_adapters.core.ranks import SINGLE_PROCESS
from resume_adapters.core.run.context import RunOptions
from resume_adapters.core.run.run import ResumableRun

MEGABYTES = 256

_MEMORY = "/dev/shm"


def measure(rounds: int) -> list[Figure]:
    """Return the seconds until a save is committed, and until a start has its checkpoint, as ratios to the disk's."""
    content = os.urandom(MEGABYTES << 20)
    saved, resumed, of_disk = [], [], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryDirectory(dir=_MEMORY) as memory:
            to_disk, to_memory = _save(Path(directory), memory, content)
            from_memory, step = _start(Path(directory), memory)
            assert step == 2, step
            from_disk, step = _start(Path(directory), memory)
            assert step == 2, step
        saved.append(to_memory / to_disk)
        resumed.append(from_memory / from_disk)
        of_disk.append(from_disk)
    what = f"{MEGABYTES} MB; from the disk's cache {figure.median(of_disk):.2f} s; load {os.getloadavg()[0]:.0f}"
    return [
        figure.of("a save to memory until it is committed, against one to the disk", saved, "x", 1.0),
        figure.of("a start that resumes from memory, against one from the disk", resumed, "x", detail=what),
    ]


def _run(directory: Path, memory: str) -> ResumableRun:
    return ResumableRun(directory, RunOptions(mirror=[Memory(directory=memory, save_every=1)]), ranks=SINGLE_PROCESS)


def _save(directory: Path, memory: str, content: bytes) -> tuple[float, float]:
    """Save step 1 to the disk and step 2 to memory alone; return the seconds that each takes until it is committed."""
    run = _run(directory, memory)
    run.open()
    run.begin(0, 0.0)

    def write(directory: Path) -> None:
        (directory / "model.bin").write_bytes(content)

    begun = time.perf_counter()
    run.saver.save("checkpoint-1", 1, SmallContent(1, write))
    while run.saver.engine.last_committed != 1:  # the copy in memory follows, while the training goes on
        time.sleep(0.001)
    on_disk = time.perf_counter()
    run.saver.flush()
    copied = time.perf_counter()
    run.saver.save_to_memory("checkpoint-2", 2, SmallContent(2, write))
    run.saver.flush()
    in_memory = time.perf_counter()
    run.close()
    return on_disk - begun, in_memory - copied


def _start(directory: Path, memory: str) -> tuple[float, int]:
    begun = time.perf_counter()
    run = _run(directory, memory)
    choice = run.open()
    seconds = time.perf_counter() - begun
    run.close()
    return seconds, choice.checkpoint.step if choice.checkpoint else 0
