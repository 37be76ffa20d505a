"""The history of a run: every start, commit, prune, resume and stop. It is appended to, and trimmed when large."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec

from resume_adapters.core.checkpoint.manifest import Count, Time
from resume_adapters.core.checkpoint.validity import CommitHistory, subjects
from resume_adapters.core.storage.base import Storage, write_atomically

_LARGE = 4 << 20
"""Bytes from which a journal is trimmed: some ten thousand entries."""

_FIRST, _LAST = 100, 2000
"""How many entries are kept in any case, of the oldest and of the newest."""

SET_ASIDE = "set-aside-on-tiers"
"""The event that what a rewind has set aside in the run directory was set aside on tiers too."""

_KEPT = ("stopped", "halted", "finished", "failed", "rewind", SET_ASIDE)


class _Former(msgspec.Struct):
    """The last status of a launch that did not live to say how it ended."""

    generation: Count
    step: Count
    updated: Time


class _Facts(msgspec.Struct):
    """What a reader of the journal counts with; an entry may have more."""

    time: Time
    event: str
    step: Annotated[int, msgspec.Meta(ge=-1, le=1 << 62)] | None = None  # -1: before the first
    generation: Count = 0
    seconds: Time = 0.0
    tiers: list[str] = []
    lost: Count = 0
    former: _Former | None = None


# Made here, once: msgspec crashes where two threads are the first to decode the same class.
_decode_facts = msgspec.json.Decoder(_Facts).decode


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
        self._committed = CommitHistory()
        self._committed_size = 0
        self._is_torn = False
        self._lock, self._process = threading.RLock(), os.getpid()

    def append(self, event: str, **facts: Any) -> None:
        """Append one line, durably: what the run has committed is known from here alone."""
        entry = {"time": self._clock(), "event": event, **facts}
        with self._using():
            # A crash may have left the last line without its end, and would take this one with it.
            line = (b"\n" if self._is_torn else b"") + msgspec.json.encode(entry) + b"\n"
            self._is_torn = True  # until it is whole: a full disk takes a part of it
            self._storage.append(self._file, line)
            self._is_torn = False
            self._storage.sync(self._file)
            self._committed.add(entry)
            self._committed_size += len(line)

    def committed(self) -> CommitHistory:
        """Return what the run has committed; the file is read only where somebody else has appended to it."""
        with self._using():
            size = self._storage.size(self._file) if self._storage.exists(self._file) else 0
            if size != self._committed_size:
                content = self._read()
                self._committed, self._committed_size = CommitHistory(_entries(content)), len(content)
                self._is_torn = not content.endswith(b"\n")
            return self._committed

    def trim(self, find: Callable[[], Collection[str | int]]) -> None:
        """If the journal is large, keep its first and last entries, all stops, and what still counts of the commits.

        Args:
            find: returns the checkpoints that still exist, by name, and by step where the journal has no name.
        """
        if not self._storage.exists(self._file) or self._storage.size(self._file) <= _LARGE:
            return
        whole, count, last = self._read(), 0, dict[str | int, int]()
        for count, entry in enumerate(_entries(whole), 1):
            last.update(dict.fromkeys(subjects(entry), count))
        there = find()
        counts = {number for subject, number in last.items() if subject in there}
        content = b"".join(
            msgspec.json.encode(entry) + b"\n"
            for number, entry in enumerate(_entries(whole), 1)
            if number <= _FIRST or number > count - _LAST or entry["event"] in _KEPT or number in counts
        )
        write_atomically(self._storage, self._file, content)
        self._committed, self._committed_size = CommitHistory(_entries(content)), len(content)
        self._is_torn = False

    def history(self) -> Iterator[dict[str, Any]]:
        """Return the entries, oldest first, without lines that a crash truncated or nobody could use."""
        return _entries(self._read())

    def _using(self) -> contextlib.AbstractContextManager[object]:
        """Return what one thread at a time may enter: the one that trains, the one that commits, or one that copies."""
        if self._process != os.getpid():  # it is a copy, in which the thread that was using it has not come along
            self._lock, self._process = threading.RLock(), os.getpid()
        return self._lock

    def _read(self) -> bytes:
        try:
            return self._storage.read(self._file)
        except FileNotFoundError:
            return b""


_LINE = re.compile(rb"[^\r\n]+")


def _entries(content: bytes) -> Iterator[dict[str, Any]]:
    for line in _LINE.finditer(content):  # one at a time: all entries of a large journal take ten times its size
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            _decode_facts(line[0])
            yield msgspec.json.decode(line[0])
