"""A storage that calls a function before each operation that changes something."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from resume_adapters.core.storage.base import Storage

CHANGES = {
    "write": 0,
    "write_range": 0,
    "append": 0,
    "sync": 0,
    "replace": 1,
    "symlink": 1,
    "make_directory": 0,
    "remove_file": 0,
    "remove_directory": 0,
}
"""The operations of a storage that change something, with the index of the argument that names the changed path."""


def counting_storage(storage: Storage, before: Callable[[Path], object]) -> Storage:
    """Return a storage that does what another one does.

    Args:
        storage: does the work.
        before: is called before each operation that changes something, with the path that it changes.
    """
    return cast("Storage", _CountingStorage(storage, before))


class _CountingStorage:
    def __init__(self, storage: Storage, before: Callable[[Path], object]) -> None:
        self._storage = storage
        self._before = before

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._storage, name)
        if name not in CHANGES:
            return operation

        def counted(*arguments: Any) -> Any:
            self._before(arguments[CHANGES[name]])
            return operation(*arguments)

        return counted
