"""The disk operations of one real save, in order; ``benchmarks.pictures`` draws them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from benchmarks.content import SmallContent
from resume_adapters import KeepLast
from resume_adapters.core.run.context import RunOptions
from resume_adapters.core.run.run import ResumableRun
from resume_adapters.core.storage.local import LocalStorage

T = TypeVar("T")

_MEGABYTES = 64


@dataclass(frozen=True)
class Operation:
    """One operation on the disk.

    Attributes:
        name: a method of a storage, or ``framework`` for the framework's own files.
        path: relative to the run directory.
        seconds: how long it took.
        waiting: whether the training waited for it.
    """

    name: str
    path: str
    seconds: float
    waiting: bool


class _Recording(LocalStorage):
    """A local disk that logs each operation."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory
        self.operations: list[Operation] = []

    def timed(self, name: str, path: Path, work: Callable[[], T]) -> T:
        begun = time.perf_counter()
        result = work()
        seconds = time.perf_counter() - begun
        relative = path.relative_to(self.directory).as_posix() if path.is_relative_to(self.directory) else "."
        waiting = threading.current_thread() is threading.main_thread()
        self.operations.append(Operation(name, relative, seconds, waiting))
        return result

    def write(self, path: Path, content: bytes) -> None:
        self.timed("write", path, lambda: LocalStorage.write(self, path, content))

    def append(self, path: Path, content: bytes) -> None:
        self.timed("append", path, lambda: LocalStorage.append(self, path, content))

    def sync(self, path: Path) -> None:
        self.timed("sync", path, lambda: LocalStorage.sync(self, path))

    def replace(self, source: Path, target: Path) -> None:
        self.timed("replace", target, lambda: LocalStorage.replace(self, source, target))

    def symlink(self, target: str, link: Path) -> bool:
        return self.timed("symlink", link, lambda: LocalStorage.symlink(self, target, link))

    def make_directory(self, path: Path) -> None:
        self.timed("make_directory", path, lambda: LocalStorage.make_directory(self, path))

    def remove_file(self, path: Path) -> None:
        self.timed("remove_file", path, lambda: LocalStorage.remove_file(self, path))

    def remove_directory(self, path: Path) -> None:
        self.timed("remove_directory", path, lambda: LocalStorage.remove_directory(self, path))

    def digest(self, path: Path, *, skip_holes: bool = False) -> tuple[int, str]:
        return self.timed("digest", path, lambda: LocalStorage.digest(self, path, skip_holes=skip_holes))


def measure(directory: Path) -> list[Operation]:
    """Save step 10, then step 20, of a run that keeps the last one; return the operations of the second save."""
    storage = _Recording(directory)
    run = ResumableRun(directory, RunOptions(keep=KeepLast(1)), storage=storage)
    run.open()
    content = np.random.default_rng(0).bytes(_MEGABYTES << 20)
    for step in (10, 20):
        storage.operations = []
        _save(run, storage, step, content)
    operations = storage.operations.copy()
    run.close()
    return operations


def _save(run: ResumableRun, storage: _Recording, step: int, content: bytes) -> None:
    def write(directory: Path) -> None:
        file = directory / "model.safetensors"
        storage.timed("framework", file, lambda: file.write_bytes(content))

    run.saver.save(f"checkpoint-{step}", step, SmallContent(step, write))
    run.saver.flush()
