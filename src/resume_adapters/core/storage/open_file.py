"""A file that a framework has begun and that is written later: kept open until the framework's save returns."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from resume_adapters.core.storage.base import Bytes

_SPARE = 64
"""Descriptors that these files leave to everything else."""


class OpenFile:
    """A file by its descriptor, whatever its name becomes.

    Args:
        descriptor: the file, open for writing; closed by :meth:`close`.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def create(cls, path: Path) -> OpenFile:
        """Create a file, or empty the one that is there, as ``open(path, "wb")`` does."""
        return cls(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666))

    @classmethod
    def same_as(cls, descriptor: int) -> OpenFile:
        """Open a file once more that somebody has open."""
        return cls(os.dup(descriptor))

    @property
    def leaves_enough(self) -> bool:
        """Whether the process can open enough files beside this one."""
        import resource  # Windows has none

        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return most == resource.RLIM_INFINITY or self._descriptor < most - _SPARE  # it is the lowest that was free

    @property
    def is_removed(self) -> bool:
        """Whether the file has no name any more."""
        return os.fstat(self._descriptor).st_nlink == 0

    def has_name(self, path: Path) -> bool:
        """Return whether a path leads to this file."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.stat(path), os.fstat(self._descriptor))
        return False

    def extend(self, size: int) -> None:
        """Give the file a size, if it is smaller; what is missing takes no room on the disk."""
        if os.fstat(self._descriptor).st_size < size:
            os.ftruncate(self._descriptor, size)

    def write(self, offset: int, content: Bytes) -> None:
        """Write into the file from an offset on."""
        view = memoryview(content)
        while view:
            written = os.pwrite(self._descriptor, view, offset)
            offset, view = offset + written, view[written:]

    def close(self) -> None:
        """Close it."""
        os.close(self._descriptor)
