"""The history of a run: every start, commit, prune, resume and stop. It is appended to, and trimmed when large."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from resume_adapters.core.storage.base import Storage, write_atomically

_LARGE = 4 << 20
"""Bytes from which a journal is trimmed: some ten thousand entries."""

_FIRST, _LAST = 100, 2000
"""How many entries are kept in any case, of the oldest and of the newest."""

_STOPS = ("stopped", "halted", "finished", "failed")


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

    def trim(self, is_there: Callable[[dict[str, Any]], bool]) -> None:
        """If the journal is large, keep its first and last entries, all stops, and the commits that still count.

        Args:
            is_there: returns whether the checkpoint of a commit still exists.
        """
        if not self._storage.exists(self._file) or self._storage.size(self._file) <= _LARGE:
            return
        entries = self.history()
        kept = [
            entry
            for number, entry in enumerate(entries)
            if number < _FIRST
            or number >= len(entries) - _LAST
            or entry["event"] in _STOPS
            or (entry["event"] == "commit" and is_there(entry))
        ]
        write_atomically(self._storage, self._file, b"".join(msgspec.json.encode(entry) + b"\n" for entry in kept))

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
