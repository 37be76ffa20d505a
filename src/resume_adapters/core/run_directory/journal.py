"""The append-only history of a run: every start, commit, prune, resume and stop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from resume_adapters.core.storage.base import Storage


class Journal:
    """``journal.jsonl``, one JSON object per line.

    Args:
        storage: the file operations.
        directory: the ``.resume`` directory.
        clock: returns seconds since 1970.
    """

    def __init__(self, storage: Storage, directory: Path, clock: Callable[[], float]) -> None:
        self._storage = storage
        self._file = directory / "journal.jsonl"
        self._clock = clock

    def append(self, event: str, **facts: Any) -> None:
        """Append one line."""
        entry = {"time": self._clock(), "event": event, **facts}
        self._storage.append(self._file, msgspec.json.encode(entry) + b"\n")

    def history(self) -> list[dict[str, Any]]:
        """Return the entries, oldest first, without a line that a crash truncated."""
        try:
            lines = self._storage.read(self._file).splitlines()
        except FileNotFoundError:
            return []
        entries: list[dict[str, Any]] = []
        for line in lines:
            with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
                entry = msgspec.json.decode(line, type=dict[str, Any])
                if isinstance(entry.get("event"), str) and isinstance(entry.get("time"), int | float):
                    entries.append(entry)
        return entries
