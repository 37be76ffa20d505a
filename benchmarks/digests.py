"""Rate of digesting a file, against a plain read of it. The file is in the page cache; the two alternate."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import figure
from benchmarks.figure import Figure
from resume_adapters.core.storage.local import LocalStorage

GOAL_RATIO = 0.8
_BYTES = 1 << 29
_CHUNK = 1 << 21


def measure(repeats: int) -> list[Figure]:
    """Return the rate of digesting as a ratio to the rate of reading."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "file"
        with open(file, "wb") as target:
            for _ in range(_BYTES // _CHUNK):
                target.write(os.urandom(_CHUNK))
        storage = LocalStorage()
        pairs = [(_rate(lambda: _read(file)), _rate(lambda: storage.digest(file))) for _ in range(repeats + 1)][1:]
    digesting = figure.median([digested for _, digested in pairs])
    reading = figure.median([read for read, _ in pairs])
    return [
        figure.of(
            "digest rate, against a plain read",
            [digested / read for read, digested in pairs],
            "x",
            GOAL_RATIO,
            at_most=False,
            detail=f"{digesting:.1f} GB/s against {reading:.1f} GB/s",
        )
    ]


def _rate(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return _BYTES / (time.perf_counter() - begun) / 1e9


def _read(file: Path) -> None:
    buffer = bytearray(_CHUNK)
    with open(file, "rb", buffering=0) as source:
        while source.readinto(buffer):
            pass
