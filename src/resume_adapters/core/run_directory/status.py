"""The status of a run, ``status.json``: for people, supervisors and the next start of the run."""

from __future__ import annotations

import functools
import os
import socket
import threading
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from resume_adapters.core.log import logger
from resume_adapters.core.run_directory.journal import Journal
from resume_adapters.core.stop.processes import is_dead, start_time
from resume_adapters.core.storage.base import Storage, temporary_path, write_atomically


class RunState(str, Enum):
    """What a run is doing, or how it ended; transitions are in :data:`TRANSITIONS`."""

    RUNNING = "running"
    STOPPED = "stopped"
    """It was asked to stop: the next launch resumes it."""
    HALTED = "halted"
    """It asked for a human: the next launch is refused until ``resume-adapters stop --undo``."""
    FINISHED = "finished"
    FAILED = "failed"
    KILLED = "killed"
    """Never on disk: the status says running, and its process is dead."""
    UNKNOWN = "unknown"
    """Never on disk: there is no status that can be read."""

    def __str__(self) -> str:
        return self.value


_STARTS = frozenset({RunState.RUNNING})

TRANSITIONS: Mapping[RunState, frozenset[RunState]] = {
    # A start ends in one of these ways, or without a word. It may fail or stop before its first step.
    RunState.RUNNING: frozenset(
        {RunState.STOPPED, RunState.HALTED, RunState.FINISHED, RunState.FAILED, RunState.KILLED}
    ),
    # The next launch resumes the run. A finished one runs on if its horizon has grown.
    RunState.STOPPED: _STARTS,
    RunState.FAILED: _STARTS,
    RunState.FINISHED: _STARTS,
    RunState.KILLED: _STARTS,
    RunState.UNKNOWN: _STARTS,
    # A human lets the run go on (`resume-adapters stop --undo`).
    RunState.HALTED: frozenset({RunState.STOPPED}),
}
"""What may become of a run. A launch is RUNNING once it owns the run directory."""


def may_start(state: RunState) -> bool:
    """Return whether a launch may start a run that was left in this state."""
    return state is RunState.RUNNING or RunState.RUNNING in TRANSITIONS[state]


class MirrorStatus(msgspec.Struct, kw_only=True, omit_defaults=True, frozen=True):
    """How far the copies on a tier are.

    Attributes:
        tier: where it is.
        step: of the newest checkpoint that this start has copied there.
        behind: how many saves are due there and not copied.
        problem: why; empty if nothing is wrong.
    """

    tier: str
    step: int | None = None
    behind: int = 0
    problem: str = ""


class RunStatus(msgspec.Struct, kw_only=True, omit_defaults=True, frozen=True):
    """The content of ``status.json``.

    Attributes:
        state: what the run is doing, or how it ended.
        step: optimizer steps completed.
        epoch: epochs completed, with the fraction of the current one.
        horizon: number of steps after which the run is finished.
        rate: optimizer steps a second, over the last minute.
        eta: when the run will be finished at that rate, in seconds since 1970.
        last_commit: step of the newest committed checkpoint.
        next_save: step of the next save, if known.
        ends: when the walltime ends, in seconds since 1970.
        generation: number of this start of the run directory.
        reason: why the run is in this state.
        result: what a finished run returned, so that a relaunch can return it again.
        host, pid, job: machine and process of the leader of the run directory, and the scheduler's job, if any; none
            after a rewind.
        updated: when this was written, in seconds since 1970.
        unremovable: old checkpoints and leftovers that this start could not remove.
        staging: which way saves leave the training, and why; empty until that is known.
        mirrors: of each tier beyond the run directory its name, the step of the newest copy, how many saves it is
            behind, and why.
    """

    state: RunState
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
    result: dict[str, int | float | None] = {}
    host: str = ""
    pid: int = 0
    job: str = ""
    updated: float = 0.0
    unremovable: int = 0
    staging: str = ""
    mirrors: list[MirrorStatus] = []


_JOB_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")
"""Environment variables in which Slurm, PBS, LSF and Grid Engine put the job id."""


def job_number() -> str:
    """Return the scheduler's id of this process's job; empty without a scheduler."""
    return next((os.environ[name] for name in _JOB_VARIABLES if os.environ.get(name)), "")


def signed(status: RunStatus, now: float) -> RunStatus:
    """Return a status that names this process as that of the run.

    Args:
        now: seconds since 1970.
    """
    return replace(status, host=socket.gethostname(), pid=os.getpid(), job=job_number(), updated=now)


# Made here, once: msgspec crashes where two threads are the first to decode the same class.
_decode = msgspec.json.Decoder(RunStatus).decode


class StatusFile:
    """``status.json``.

    Args:
        storage: the file operations.
        directory: the ``.resume`` directory.
        journal: gets an entry when the state changes.
    """

    def __init__(self, storage: Storage, directory: Path, journal: Journal) -> None:
        self._storage = storage
        self._file = directory / "status.json"
        self._journal = journal
        self._written: RunState | None = None

    def write(self, status: RunStatus) -> None:
        """Replace ``status.json``, durably, and append a change of the state to the journal."""
        write_atomically(self._storage, self._file, msgspec.json.encode(status))
        if status.state is not self._written:
            self._written = status.state
            self._journal.append(
                status.state.value, step=status.step, generation=status.generation, reason=status.reason
            )

    def refresh(self, status: RunStatus) -> None:
        """Replace ``status.json`` atomically; not fsynced, since losing the latest refresh is harmless."""
        temporary = temporary_path(self._file)
        self._storage.write(temporary, msgspec.json.encode(status))
        self._storage.replace(temporary, self._file)

    def remove(self) -> None:
        """Remove ``status.json``."""
        self._storage.remove_file(self._file)

    def read(self) -> RunStatus | None:
        """Return the last status; ``None`` if there is none, or it cannot be decoded."""
        try:
            return _decode(self._storage.read(self._file))
        except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None


def is_alive(status: RunStatus) -> bool | None:
    """Return whether the process that wrote a status is alive; ``None`` if it ran on another host."""
    if status.host != socket.gethostname():
        return None
    if not 0 < status.pid < 1 << 31:
        return False
    try:
        os.kill(status.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it exists, and belongs to another user
        pass
    if is_dead(status.pid):
        return False
    beginning = start_time(status.pid)
    # A process that began after the status was written is another one that got the same pid.
    return beginning is None or beginning <= status.updated + 2.0  # the boot time is known to the second


def observed_state(status: RunStatus | None) -> RunState:
    """Return the state of a run as seen from this process, which may find that the run was killed."""
    if status is None:
        return RunState.UNKNOWN
    if status.state is RunState.RUNNING and is_alive(status) is False:
        return RunState.KILLED
    return status.state


class StatusPublisher:
    """Writes ``status.json`` from two threads, the training thread and the monitor.

    Args:
        file: the status file.
        is_owned: returns whether this start still owns the run directory.
        describe: returns the present status of a run, given its state.

    Attributes:
        state: the last one that was set; ``None`` before the first.
    """

    def __init__(
        self, file: StatusFile, is_owned: Callable[[], bool], describe: Callable[[RunState], RunStatus]
    ) -> None:
        self._file = file
        self._is_owned = is_owned
        self._describe = describe
        self.state: RunState | None = None
        self._facts: Mapping[str, Any] = {}
        self._undo_announcing: Callable[[], None] | None = None
        self._writing = threading.Lock()

    def set_state(self, state: RunState, facts: Mapping[str, Any]) -> None:
        """Write the status of a run that changes its state, unless a later start owns the run directory.

        It is for people to look at: where it cannot be written, that is logged.

        Args:
            state: the new state.
            facts: fields of :class:`RunStatus` that are known better than from the last step.
        """
        with self._writing:
            self.state, self._facts = state, facts
            self._write()

    def announce(self, generation: int, now: float) -> RunStatus | None:
        """Write that this start owns the run directory, before its first state; the journal does not have it yet.

        Args:
            generation: of this start.
            now: seconds since 1970.

        Returns:
            The status that the start before left.
        """
        former = self._file.read()
        self._undo_announcing = self._file.remove if former is None else functools.partial(self._file.refresh, former)
        known = RunStatus(state=RunState.RUNNING) if former is None else former
        taken = RunStatus(
            state=RunState.RUNNING,
            step=known.step,
            epoch=known.epoch,
            horizon=known.horizon,
            last_commit=known.last_commit,
            generation=generation,
            reason="it chooses what it resumes from",
        )
        self._try_to(lambda: self._file.refresh(signed(taken, now)), taken.state.value)
        return former

    def restore(self) -> None:
        """Write the status again that the start before left, if this one has announced itself and set no state."""
        undo, self._undo_announcing = self._undo_announcing, None
        if undo is not None and self.state is None:
            self._try_to(undo, "as the launch before left it")

    def repeat(self) -> None:
        """Write the last state again, with what has changed beside it."""
        with self._writing:
            self._write()

    def _write(self) -> None:
        if (state := self.state) is not None:
            self._try_to(lambda: self._file.write(replace(self._describe(state), **self._facts)), state.value)

    def _try_to(self, write: Callable[[], None], state: str) -> None:
        try:
            if self._is_owned():
                write()
        except OSError as error:
            logger.error("The status of the run, which is %s, could not be written: %s", state, error)

    def refresh(self) -> None:
        """Update the status of a running run; a state that the training thread has set since stays."""
        with self._writing:
            if self.state is RunState.RUNNING:
                self._file.refresh(self._describe(self.state))
