"""Faults that the tests inject: a storage that dies or fails at any operation, a loss of power, and damaged files."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from resume_adapters.core.run import monitor
from resume_adapters.core.storage.local import LocalStorage

MUTATIONS = ("write", "append", "sync", "replace", "symlink", "make_directory", "remove_file", "remove_directory")
READS = ("read", "digest", "entries")


def refuse(number: int, path: Path | None = None) -> NoReturn:
    """Raise what the system does with an errno."""
    raise OSError(number, os.strerror(number), None if path is None else str(path))


class Disturbed(LocalStorage):
    """A local disk on which a function is called before each operation: it may raise, or be what comes between.

    Attributes:
        before: is given the name of the operation and the path, which is that of the target where there are two.
    """

    def __init__(self, before: Callable[[str, Path], object] = lambda operation, path: None) -> None:
        super().__init__()
        self.before = before


def _disturbed(name: str) -> Callable[..., Any]:
    operation = getattr(LocalStorage, name)

    def disturbed(self: Disturbed, path: Path, *rest: Any, **named: Any) -> Any:
        self.before(name, rest[0] if name in ("replace", "symlink") else path)
        return operation(self, path, *rest, **named)

    return disturbed


for _name in (*MUTATIONS, *READS):
    setattr(Disturbed, _name, _disturbed(_name))


class Crash(BaseException):
    """The process died here: nothing but the test catches it."""


class CrashingStorage(Disturbed):
    """A local disk whose process dies before its nth mutating operation.

    What the monitor does once a second is not counted: how much that is between two lines, no test can know.

    Args:
        crash_at: the operation (counted from 0) before which it dies; ``None``: never, it only counts.
        torn: a crash in a ``write`` or ``append`` leaves the first half of the content.

    Attributes:
        operations: what was done or begun, in order.
    """

    def __init__(self, crash_at: int | None = None, *, torn: bool = False) -> None:
        super().__init__(self._note)
        self.crash_at = crash_at
        self.torn = torn
        self.operations: list[tuple[str, Path]] = []

    @property
    def crashed(self) -> bool:
        return self.crash_at is not None and len(self.operations) > self.crash_at

    def _note(self, name: str, path: Path) -> None:
        if name in MUTATIONS and threading.current_thread().name != monitor.THREAD_NAME:
            self._count(name, path)

    def _count(self, name: str, path: Path) -> None:
        if self.crashed:
            raise Crash("the process is dead")
        self.operations.append((name, path))
        if self.crashed:
            self._die()

    def _die(self) -> None:
        raise Crash(f"before operation {self.crash_at}: {self.operations[-1]}")

    def write(self, path: Path, content: bytes) -> None:
        self._in_halves(super().write, LocalStorage.write, path, content)

    def append(self, path: Path, content: bytes) -> None:
        self._in_halves(super().append, LocalStorage.append, path, content)

    def _in_halves(self, work: Callable[..., None], native: Callable[..., None], path: Path, content: bytes) -> None:
        try:
            work(path, content)
        except Crash:
            if self.torn and len(self.operations) == (self.crash_at or 0) + 1:
                native(self, path, content[: len(content) // 2])
            raise


class FreezingStorage(CrashingStorage):
    """A local disk whose process is frozen before its nth mutating operation, and wakes up after something else.

    Args:
        freeze_at: the operation (counted from 0) before which it is frozen; ``None``: never, it only counts.
        meanwhile: what happens until it wakes up.
    """

    def __init__(self, freeze_at: int | None = None, meanwhile: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.freeze_at = freeze_at
        self.meanwhile = meanwhile

    def _count(self, name: str, path: Path) -> None:
        self.operations.append((name, path))
        if len(self.operations) - 1 == self.freeze_at:
            self.meanwhile()


class FailingStorage(CrashingStorage):
    """A disk whose nth operation fails with an errno, once or from then on; the process lives.

    Args:
        number: the errno, for example ``errno.ENOSPC``.
        fail_at: the operation that fails.
        only: names of the operations that can fail; the others are neither counted nor failed.
        lasting: every such operation after it fails too.
    """

    def __init__(
        self, number: int, fail_at: int = 0, *, only: tuple[str, ...] = MUTATIONS, lasting: bool = False
    ) -> None:
        super().__init__()
        self.number = number
        self.fail_at: int | None = fail_at
        self.only = only
        self.lasting = lasting

    def _count(self, name: str, path: Path) -> None:
        if name not in self.only:
            return
        self.operations.append((name, path))
        index = len(self.operations) - 1
        if self.fail_at is not None and (index == self.fail_at or (self.lasting and index > self.fail_at)):
            refuse(self.number, path)


def no_space(fail_at: int = 0, *, lasting: bool = False) -> FailingStorage:
    """Return a disk that is full: what adds to it fails, what frees space does not."""
    return FailingStorage(errno.ENOSPC, fail_at, only=("write", "append", "sync", "make_directory"), lasting=lasting)


def cut(file: Path) -> None:
    """Keep the first half of a file."""
    os.truncate(file, file.stat().st_size // 2)


def empty(file: Path) -> None:
    """Keep no byte of a file."""
    os.truncate(file, 0)


def zero(file: Path) -> None:
    """Replace a file's content with as many zero bytes, as a file system may after a crash."""
    file.write_bytes(bytes(file.stat().st_size))


def remove(file: Path) -> None:
    """Remove a file."""
    file.unlink()


def flip(file: Path, bit: int | None = None) -> None:
    """Flip one bit of a file, the middle one unless told."""
    content = bytearray(file.read_bytes())
    place = len(content) * 4 if bit is None else bit
    content[place // 8] ^= 1 << place % 8
    file.write_bytes(bytes(content))


DAMAGES: dict[str, Callable[[Path], None]] = {
    "cut": cut,
    "emptied": empty,
    "zeroed": zero,
    "removed": remove,
    "flipped": flip,
}
"""Every kind of damage, by the word that a test's name uses. Each changes any file that is not empty (nor all zero)."""


def files_of(checkpoint: Path) -> list[Path]:
    """Return the files of a checkpoint, the manifest among them, in name order."""
    places = [checkpoint, *checkpoint.rglob("*"), *checkpoint.with_name(f"{checkpoint.name}.resume").rglob("*")]
    return sorted(file for file in places if file.is_file())
