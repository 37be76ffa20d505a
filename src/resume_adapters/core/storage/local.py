"""The local disk, or one that is mounted like it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import xxhash

_CHUNK = 1 << 21
"""Bytes read and hashed at a time: large enough that the calls cost little, small enough to stay in a core's caches."""


class LocalStorage:
    """A :class:`Storage` on a mounted file system, local or shared."""

    def write(self, path: Path, content: bytes) -> None:
        with open(path, "wb") as file:
            file.write(content)

    def append(self, path: Path, content: bytes) -> None:
        with open(path, "ab") as file:
            file.write(content)

    def sync(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def replace(self, source: Path, target: Path) -> None:
        os.replace(source, target)

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
        path.unlink()

    def remove_directory(self, path: Path) -> None:
        path.rmdir()

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
