"""The status of a run: for people, supervisors and its own next start."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from resume_adapters.core.run_directory.journal import Journal
from resume_adapters.core.stop.processes import is_dead, start_time
from resume_adapters.core.storage.base import Storage, write_atomically


class RunStatus(msgspec.Struct, kw_only=True, omit_defaults=True):
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


_JOB_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")
"""In which Slurm, PBS, LSF and Grid Engine say which job a process belongs to."""


def job_number() -> str:
    """Return the scheduler's name for the job of this process; empty without a scheduler."""
    return next((os.environ[name] for name in _JOB_VARIABLES if os.environ.get(name)), "")


class StatusFile:
    """``status.json``.

    Args:
        storage: where to write.
        directory: the ``.resume`` directory.
        journal: gets an entry when the state changes.
        clock: returns seconds since 1970.
    """

    def __init__(self, storage: Storage, directory: Path, journal: Journal, clock: Callable[[], float]) -> None:
        self._storage = storage
        self._file = directory / "status.json"
        self._journal = journal
        self._clock = clock
        self._written = ""

    def write(self, status: RunStatus) -> None:
        """Replace ``status.json``, durably, and append a change of the state to the journal."""
        write_atomically(self._storage, self._file, self._signed(status))
        if status.state != self._written:
            self._written = status.state
            self._journal.append(status.state, step=status.step, generation=status.generation, reason=status.reason)

    def refresh(self, status: RunStatus) -> None:
        """Replace ``status.json`` atomically; not fsynced, since losing the latest refresh is harmless."""
        temporary = self._file.with_name(".status.json.live")
        self._storage.write(temporary, self._signed(status))
        self._storage.replace(temporary, self._file)

    def _signed(self, status: RunStatus) -> bytes:
        status.host, status.pid, status.job = socket.gethostname(), os.getpid(), job_number()
        status.updated = self._clock()
        return msgspec.json.encode(status)

    def read(self) -> RunStatus | None:
        """Return the last status, or ``None`` where there is none that can be read."""
        try:
            return msgspec.json.decode(self._storage.read(self._file), type=RunStatus)
        except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
            return None


def is_alive(status: RunStatus) -> bool | None:
    """Return whether the process that wrote a status still lives; ``None`` where it ran on another host."""
    if status.host != socket.gethostname():
        return None
    if not 0 < status.pid < 1 << 31:
        return False
    try:
        os.kill(status.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is there, and somebody else's
        pass
    if is_dead(status.pid):
        return False
    beginning = start_time(status.pid)
    # A process that began after the status is another one, to which the number was given again.
    return beginning is None or beginning <= status.updated + 2.0  # the boot time is known to the second
