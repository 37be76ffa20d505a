"""What a run directory remembers about the run: its generation, its live status, and an append-only journal."""

from __future__ import annotations

import contextlib
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
        state: ``running``, ``stopped``, ``halted``, ``finished`` or ``failed``.
        step: optimizer steps completed.
        epoch: epochs completed, with the fraction of the running one.
        horizon: steps after which the run is finished.
        rate: optimizer steps a second, over the last minute.
        eta: when it will be finished at that rate, in seconds since 1970.
        last_commit: step of the newest committed checkpoint.
        next_save: step after which the next save falls, as far as that is known.
        ends: when it is ended from outside (its walltime), in seconds since 1970.
        generation: which start of the run directory this is.
        reason: why it is in this state.
        result: what a finished run returned, so that a relaunch can return it again.
        host, pid, job: the machine and the process that leads the run directory, and the scheduler's job, where there
            is one.
        updated: when this was written, in seconds since 1970.
    """

    state: str
    step: int = 0
    epoch: float = 0.0
    horizon: int | None = None
    rate: float | None = None
    eta: float | None = None
    last_commit: int | None = None
    next_save: int | None = None
    ends: float | None = None
    generation: int = 0
    reason: str = ""
    result: dict[str, Any] = {}
    host: str = ""
    pid: int = 0
    job: str = ""
    updated: float = 0.0


class _Generation(msgspec.Struct, kw_only=True, omit_defaults=True):
    generation: int
    token: str
    host: str = ""
    pid: int = 0
    job: str = ""
    started: float = 0.0

    def __str__(self) -> str:
        job = f"job {self.job}, " if self.job else ""
        where = f" ({job}process {self.pid} on {self.host})" if self.pid else ""
        return f"start {self.generation}{where}"


_JOB_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")
"""In which Slurm, PBS, LSF and Grid Engine say which job a process belongs to."""


def job_number() -> str:
    """Return the scheduler's name for the job of this process; empty without a scheduler."""
    return next((os.environ[name] for name in _JOB_VARIABLES if os.environ.get(name)), "")


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
        self.stop_file = directory / "stop"
        self.token = uuid.uuid4().hex
        self._noted = ""

    def generation(self) -> int:
        """Return how many starts the run directory has seen."""
        current = self._read_generation()
        return current.generation if current else 0

    def next_generation(self, after: int = 0) -> int:
        """Take the next generation for this start; from now on, earlier starts can commit nothing.

        Args:
            after: the number of starts that the run's other directories have seen.
        """
        generation = max(self.generation(), after) + 1
        taken = _Generation(
            generation=generation,
            token=self.token,
            host=socket.gethostname(),
            pid=os.getpid(),
            job=job_number(),
            started=self.clock(),
        )
        write_atomically(self.storage, self.directory / "generation", msgspec.json.encode(taken))
        return generation

    def require_generation(self, generation: int) -> None:
        """Check that no later start has taken the run directory over.

        Raises:
            FencedOff: one has, or the token is gone.
        """
        if not self.is_owned():
            current = self._read_generation()
            owner = "nobody (its token is gone)" if current is None else str(current)
            raise FencedOff(
                f"this process is start {generation} of {self.directory.parent}, which {owner} owns now: nothing more "
                "is committed from here. Two jobs were started on one run directory; the later one goes on",
                path=self.directory.parent,
            )

    def is_owned(self) -> bool:
        """Return whether this start is the last that took a generation."""
        current = self._read_generation()
        return current is not None and current.token == self.token

    def later_start(self) -> str | None:
        """Return the start that took the run directory over from this one, in words; ``None`` where none did."""
        current = self._read_generation()
        return None if current is None or current.token == self.token else str(current)

    def _read_generation(self) -> _Generation | None:
        try:
            return msgspec.json.decode(self.storage.read(self.directory / "generation"), type=_Generation)
        except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
            return None

    def request_stop(self, reason: str) -> None:
        """Ask the run to stop, from any process that sees its directory."""
        write_atomically(self.storage, self.stop_file, reason.encode())

    def stop_requested(self) -> str | None:
        """Return why the stop file asks the run to stop; ``None`` where there is no such file."""
        if not self.stop_file.exists():
            return None
        try:
            written = self.storage.read(self.stop_file).decode(errors="replace").strip()
        except OSError:
            written = ""
        return written[:200] or f"{self.stop_file.name} in {self.directory.name}"

    def withdraw_stop(self) -> None:
        """Forget that the run was asked to stop: it does, or it is a later start."""
        if self.stop_file.exists():
            self.storage.remove_file(self.stop_file)

    def note(self, event: str, **facts: Any) -> None:
        """Append one line to ``journal.jsonl``."""
        entry = {"time": self.clock(), "event": event, **facts}
        self.storage.append(self.directory / "journal.jsonl", msgspec.json.encode(entry) + b"\n")

    def history(self) -> list[dict[str, Any]]:
        """Return the entries of ``journal.jsonl``, oldest first; a line that a crash cut short is left out."""
        try:
            lines = self.storage.read(self.directory / "journal.jsonl").splitlines()
        except FileNotFoundError:
            return []
        entries: list[dict[str, Any]] = []
        for line in lines:
            with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
                entry = msgspec.json.decode(line, type=dict[str, Any])
                if isinstance(entry.get("event"), str) and isinstance(entry.get("time"), int | float):
                    entries.append(entry)
        return entries

    def set_status(self, status: Status) -> None:
        """Replace ``status.json``, durably, and note in the journal when the state changes."""
        write_atomically(self.storage, self.directory / "status.json", self._signed(status))
        if status.state != self._noted:
            self._noted = status.state
            self.note(status.state, step=status.step, generation=status.generation, reason=status.reason)

    def refresh_status(self, status: Status) -> None:
        """Replace ``status.json`` so that a reader finds the old or the new one; what a loss of power undoes is news.

        Nothing is forced onto the disk: it is done often, and worth no wait.
        """
        file = self.directory / "status.json"
        temporary = file.with_name(".status.json.live")
        self.storage.write(temporary, self._signed(status))
        self.storage.replace(temporary, file)

    def _signed(self, status: Status) -> bytes:
        status.host, status.pid, status.job = socket.gethostname(), os.getpid(), job_number()
        status.updated = self.clock()
        return msgspec.json.encode(status)

    def status(self) -> Status | None:
        """Return the last status, or ``None`` where there is none that can be read."""
        try:
            return msgspec.json.decode(self.storage.read(self.directory / "status.json"), type=Status)
        except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
            return None
