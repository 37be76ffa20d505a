"""The local disk, or a file system that is mounted like one."""

from __future__ import annotations

import errno
import functools
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import xxhash

from resume_adapters.core.storage.base import Entry, Stamp

_CHUNK = 1 << 21
"""Bytes read and hashed at a time: large enough for few calls, small enough for a core's caches."""


class LocalStorage:
    """A :class:`~resume_adapters.core.storage.base.Storage` on a mounted file system, local or shared."""

    def __init__(self) -> None:
        self._held: dict[Path, int] = {}

    def _at(self, path: Path) -> tuple[Path | str, int | None]:
        """Return a path and the descriptor that it is relative to: that of the directory, where it is held."""
        held = self._held.get(path.parent)
        return (path, None) if held is None else (path.name, held)

    def exists(self, path: Path) -> bool:
        return os.path.exists(path)  # pathlib takes twice as long, and a start asks ten thousands of times

    def is_file(self, path: Path) -> bool:
        return os.path.isfile(path)

    def is_directory(self, path: Path) -> bool:
        return os.path.isdir(path)

    def is_link(self, path: Path) -> bool:
        return os.path.islink(path)

    def read_link(self, path: Path) -> str:
        return os.readlink(path)

    def real_path(self, path: Path) -> Path:
        return Path(os.path.realpath(path))

    def size(self, path: Path) -> int:
        return os.stat(path).st_size

    def free_bytes(self, path: Path) -> int:
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def stamp(self, path: Path) -> Stamp | None:
        try:
            found = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return Stamp(found.st_ino, found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else None

    def entries(self, path: Path) -> list[Entry]:
        with os.scandir(path) as entries:
            return [Entry(entry.name, _kind(entry)) for entry in entries]

    def read(self, path: Path) -> bytes:
        return path.read_bytes()

    def digest(self, path: Path) -> tuple[int, str]:
        hasher = xxhash.xxh3_128()
        buffer = bytearray(_CHUNK)
        view = memoryview(buffer)
        size = 0
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                hasher.update(view[:count])
                size += count
        return size, hasher.hexdigest()

    def write(self, path: Path, content: bytes) -> None:
        name, held = self._at(path)
        with open(path, "wb", opener=lambda _, flags: os.open(name, flags, 0o666, dir_fd=held)) as file:
            file.write(content)

    def append(self, path: Path, content: bytes) -> None:
        with open(path, "ab") as file:
            file.write(content)

    def keep_open(self, path: Path) -> Callable[[], None]:
        return functools.partial(os.close, os.open(path, os.O_RDONLY))

    def sync(self, path: Path) -> None:
        if path in self._held:
            os.fsync(self._held[path])
            return
        name, held = self._at(path)
        descriptor = os.open(name, os.O_RDONLY, dir_fd=held)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def replace(self, source: Path, target: Path) -> None:
        (old, source_held), (new, target_held) = self._at(source), self._at(target)
        os.replace(old, new, src_dir_fd=source_held, dst_dir_fd=target_held)

    def symlink(self, target: str, link: Path) -> bool:
        try:
            os.symlink(target, link)
        except OSError as error:
            if error.errno in (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP):
                return False
            raise
        return True

    def make_directory(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def remove_file(self, path: Path) -> None:
        name, held = self._at(path)
        os.remove(name, dir_fd=held)

    def remove_directory(self, path: Path) -> None:
        path.rmdir()

    def hold(self, directory: Path) -> None:
        self._held[directory] = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)

    def release(self, directory: Path) -> None:
        os.close(self._held.pop(directory))


def _kind(entry: os.DirEntry[str]) -> Literal["file", "directory", "link", "other"]:
    if entry.is_symlink():
        return "link"
    if entry.is_dir():
        return "directory"
    return "file" if entry.is_file() else "other"
