"""What a run directory remembers about the run: its generation, its live status, and an append-only journal."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from resume_adapters.core.storage import Storage, write_atomically
from resume_adapters.errors import FencedOff


class Status(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How a run is, for people, supervisors and its own next start.

    Attributes:
        state: ``running``, ``stopped``, ``finished`` or ``failed``.
        step: optimizer steps completed.
        epoch: epochs completed, with the fraction of the running one.
        horizon: steps after which the run is finished.
        last_commit: step of the newest committed checkpoint.
        generation: which start of the run directory this is.
        reason: why it is in this state.
        result: what a finished run returned, so that a relaunch can return it again.
    """

    state: str
    step: int = 0
    epoch: float = 0.0
    horizon: int | None = None
    last_commit: int | None = None
    generation: int = 0
    reason: str = ""
    result: dict[str, Any] = {}
    host: str = ""
    pid: int = 0
    updated: float = 0.0


class _Generation(msgspec.Struct):
    generation: int
    token: str


class Journal:
    """The ``.resume`` directory of a run.

    Args:
        storage: where to write.
        directory: the ``.resume`` directory.
        clock: returns seconds since 1970.
    """

    def __init__(self, storage: Storage, directory: Path, clock: Callable[[], float]) -> None:
        self.storage = storage
        self.directory = directory
        self.clock = clock
        self.token = uuid.uuid4().hex
        self._noted = ""

    def next_generation(self) -> int:
        """Take the next generation for this start; from now on, earlier starts can commit nothing."""
        current = self._read_generation()
        generation = current.generation + 1 if current else 1
        content = msgspec.json.encode(_Generation(generation, self.token))
        write_atomically(self.storage, self.directory / "generation", content)
        return generation

    def require_generation(self, generation: int) -> None:
        """Check that no later start has taken the run directory over.

        Raises:
            FencedOff: one has, or the token is gone.
        """
        if not self.is_owned():
            current = self._read_generation()
            owner = "nobody (its token is gone)" if current is None else f"start {current.generation}"
            raise FencedOff(
                f"this process is start {generation} of {self.directory.parent}, which {owner} owns now: nothing more "
                "is committed from here. Two jobs were started on one run directory; the later one goes on",
                path=self.directory.parent,
            )

    def is_owned(self) -> bool:
        """Return whether this start is the last that took a generation."""
        current = self._read_generation()
        return current is not None and current.token == self.token

    def _read_generation(self) -> _Generation | None:
        try:
            return msgspec.json.decode(self.storage.read(self.directory / "generation"), type=_Generation)
        except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
            return None

    def note(self, event: str, **facts: Any) -> None:
        """Append one line to ``journal.jsonl``."""
        entry = {"time": self.clock(), "event": event, **facts}
        self.storage.append(self.directory / "journal.jsonl", msgspec.json.encode(entry) + b"\n")

    def set_status(self, status: Status) -> None:
        """Replace ``status.json``, and note in the journal when the state changes."""
        status.host, status.pid, status.updated = socket.gethostname(), os.getpid(), self.clock()
        write_atomically(self.storage, self.directory / "status.json", msgspec.json.encode(status))
        if status.state != self._noted:
            self._noted = status.state
            self.note(status.state, step=status.step, generation=status.generation, reason=status.reason)

    def status(self) -> Status | None:
        """Return the last status, or ``None`` where there is none that can be read."""
        try:
            return msgspec.json.decode(self.storage.read(self.directory / "status.json"), type=Status)
        except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
            return None
