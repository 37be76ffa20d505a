"""How much memory this process may still take: of the machine, and of the control groups that it is in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil

from resume_adapters.core.storage.base import Storage

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
