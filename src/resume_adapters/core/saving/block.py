"""The memory into which saves are copied: one block, kept from save to save."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from resume_adapters.core import devices
from resume_adapters.core.storage.base import Storage

_ALIGNMENT = 64
"""Bytes: where a cache line begins."""


class Block:
    """A block of memory, all of it allocated.

    Args:
        size: bytes.

    Attributes:
        size: bytes.
        memory: all of it.

    Raises:
        OSError: the system has not that much.
    """

    def __init__(self, size: int) -> None:
        import torch

        self.size = size
        descriptor = os.memfd_create("resume-adapters")
        try:
            os.posix_fallocate(descriptor, 0, size)  # else a system that has no more kills with SIGBUS
            # Shared: where a worker of a loader is forked, pages are not copied at the next save.
            self._map = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
        finally:
            os.close(descriptor)
        self.memory = memoryview(self._map)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._used = 0
        self._events: list[Any] = []
        self._pinned: dict[Any, Callable[[], object] | None] = {}

    def clear(self) -> None:
        """Count everything as free."""
        self._used = 0

    def begin(self) -> int:
        """Return the offset of what is free."""
        return self._used

    def take(self, size: int) -> None:
        """Count so many bytes from :meth:`begin` on as used."""
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT

    def tensor(self, offset: int, size: int) -> Any:
        """Return a part as a tensor of bytes."""
        return self._bytes[offset : offset + size]

    def copy(self, offset: int, source: Any) -> None:
        """Copy a tensor of bytes to an offset, from whatever device.

        From a device that can, it is copied in the order of the device's current stream: what the training does to the
        tensor afterwards comes after the copy, and the host does not wait. :meth:`wait` does.
        """
        target = self.tensor(offset, source.numel())
        if source.device.type == "cpu":
            target.copy_(source)
            return
        if source.device.type not in self._pinned:
            self._pinned[source.device.type] = devices.pin(self._bytes.data_ptr(), self.size, source.device)
        is_pinned = self._pinned[source.device.type] is not None
        target.copy_(source, non_blocking=is_pinned)
        if is_pinned:
            self._events.append(devices.record_event(source.device))

    def wait(self) -> None:
        """Wait until everything is there that devices copy."""
        for each in self._events:
            each.synchronize()
        self._events.clear()

    def close(self) -> None:
        """Give the memory back, with the last reference to a part of it."""
        self.wait()
        for unpin in self._pinned.values():
            if unpin is not None:
                unpin()
        self._pinned.clear()


_GROUPS = Path("sys/fs/cgroup")

_VERSIONS = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""The files of both versions of control groups, by the controller's name: limit, use, and how much can be freed."""


def available_memory(storage: Storage, root: Path = Path("/")) -> int:
    """Return the bytes that this process may still take.

    Args:
        storage: reads what the system says.
        root: where ``proc`` and ``sys`` are.
    """
    of_machine: int = psutil.virtual_memory().available
    return min([of_machine, *_left_in_groups(storage, root)])


def _left_in_groups(storage: Storage, root: Path) -> Iterator[int]:
    lines = _read(storage, root / "proc/self/cgroup").splitlines()
    for _, controllers, path in (line.split(":", 2) for line in lines):
        for name, files in _VERSIONS.items():
            if name in controllers.split(","):
                top = root / _GROUPS / name
                group = top / path.strip("/")
                # In a container, its own group may be what lies at the top.
                for each in {top, group, *(parent for parent in group.parents if top in parent.parents)}:
                    yield from _left(storage, each, *files)


def _left(storage: Storage, group: Path, limit: str, use: str, freeable: str) -> Iterator[int]:
    with contextlib.suppress(ValueError):  # "max": no limit; or there is no such file
        most, used = int(_read(storage, group / limit)), int(_read(storage, group / use))
        counts = dict(line.split() for line in _read(storage, group / "memory.stat").splitlines())
        yield max(0, most - used + int(counts.get(freeable, 0)))


def _read(storage: Storage, file: Path) -> str:
    try:
        return storage.read(file).decode()
    except OSError:
        return ""
