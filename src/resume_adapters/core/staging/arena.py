"""The memory into which saves are copied: one block, kept from save to save, that another process can map."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from collections.abc import Callable

_ALIGNMENT = 64
"""Bytes: where a cache line begins."""

_CHUNK = 1 << 23
"""Bytes that are copied between two chances for other threads."""


@functools.cache
def _memcmp() -> Callable[[int, int, int], int]:
    """Return the function of C; only where a run is: on Windows nothing is known of it when this is imported."""
    found = ctypes.CDLL(None).memcmp
    found.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    return found


class Arena:
    """A block of shared memory, all of it allocated.

    Args:
        size: bytes.

    Raises:
        OSError: the system has not that much.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.descriptor = os.memfd_create("resume-adapters")
        try:
            os.posix_fallocate(self.descriptor, 0, size)  # else a system that has no more kills with SIGBUS
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            self._map = mmap.mmap(self.descriptor, size, flags=flags)
        except BaseException:
            os.close(self.descriptor)
            raise
        self._first = ctypes.c_char.from_buffer(self._map)
        self._used = 0

    @property
    def memory(self) -> memoryview:
        """The whole block."""
        return memoryview(self._map)

    def clear(self) -> None:
        """Take everything for free."""
        self._used = 0

    def has_room(self, size: int, parts: int) -> bool:
        """Return whether this many parts, of so many bytes together, still fit."""
        return self._used + size + parts * _ALIGNMENT <= self.size

    def reserve(self, size: int) -> int:
        """Return the offset of a free part; see :meth:`has_room`."""
        begin = self._used
        self._used = begin + -(-size // _ALIGNMENT) * _ALIGNMENT
        return begin

    def address(self, offset: int) -> int:
        """Return the address of a part."""
        return ctypes.addressof(self._first) + offset

    def copy(self, offset: int, address: int, size: int) -> None:
        """Copy memory of this process into a part. Other threads run meanwhile."""
        target = self.address(offset)
        for at in range(0, size, _CHUNK):
            ctypes.memmove(target + at, address + at, min(_CHUNK, size - at))

    def holds(self, offset: int, address: int, size: int) -> bool:
        """Return whether a part is what memory of this process is now."""
        return _memcmp()(self.address(offset), address, size) == 0

    def close(self) -> None:
        """Give the memory back with the last reference to this: a copy in it may still have to be compared."""
        os.close(self.descriptor)
