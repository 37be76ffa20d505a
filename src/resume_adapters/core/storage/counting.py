"""A storage that calls a function before each operation that changes something."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from resume_adapters.core.storage.base import Entry, Stamp, Storage


class CountingStorage:
    """A :class:`~resume_adapters.core.storage.base.Storage` on another one.

    Args:
        storage: does the work.
        before: is called before each operation that changes something, with the path that it changes.
    """

    def __init__(self, storage: Storage, before: Callable[[Path], None]) -> None:
        self._storage = storage
        self._before = before

    def exists(self, path: Path) -> bool:
        return self._storage.exists(path)

    def is_file(self, path: Path) -> bool:
        return self._storage.is_file(path)

    def is_directory(self, path: Path) -> bool:
        return self._storage.is_directory(path)

    def is_link(self, path: Path) -> bool:
        return self._storage.is_link(path)

    def read_link(self, path: Path) -> str:
        return self._storage.read_link(path)

    def real_path(self, path: Path) -> Path:
        return self._storage.real_path(path)

    def size(self, path: Path) -> int:
        return self._storage.size(path)

    def stamp(self, path: Path) -> Stamp | None:
        return self._storage.stamp(path)

    def free_bytes(self, path: Path) -> int:
        return self._storage.free_bytes(path)

    def keep_open(self, path: Path) -> Callable[[], None]:
        return self._storage.keep_open(path)

    def entries(self, path: Path) -> list[Entry]:
        return self._storage.entries(path)

    def read(self, path: Path) -> bytes:
        return self._storage.read(path)

    def digest(self, path: Path) -> tuple[int, str]:
        return self._storage.digest(path)

    def write(self, path: Path, content: bytes) -> None:
        self._before(path)
        self._storage.write(path, content)

    def append(self, path: Path, content: bytes) -> None:
        self._before(path)
        self._storage.append(path, content)

    def sync(self, path: Path) -> None:
        self._before(path)
        self._storage.sync(path)

    def replace(self, source: Path, target: Path) -> None:
        self._before(target)
        self._storage.replace(source, target)

    def symlink(self, target: str, link: Path) -> bool:
        self._before(link)
        return self._storage.symlink(target, link)

    def make_directory(self, path: Path) -> None:
        self._before(path)
        self._storage.make_directory(path)

    def remove_file(self, path: Path) -> None:
        self._before(path)
        self._storage.remove_file(path)

    def remove_directory(self, path: Path) -> None:
        self._before(path)
        self._storage.remove_directory(path)

    def hold(self, directory: Path) -> None:
        self._storage.hold(directory)

    def release(self, directory: Path) -> None:
        self._storage.release(directory)
