"""The ``.resume`` directory of a run directory: its journal, its fencing token, its status and its stop file.

Fencing: a later start of a run directory locks an earlier one out. ``.resume/generation`` holds the number of starts
and the token of the last one. A start commits, prunes and writes the status only while its own token is in that file.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn

import msgspec

from resume_adapters.core.checkpoint.layout import CONTROL
from resume_adapters.core.checkpoint.manifest import Time
from resume_adapters.core.log import logger
from resume_adapters.core.run_directory.journal import Journal
from resume_adapters.core.run_directory.status import StatusFile, job_number
from resume_adapters.core.storage.base import Storage, write_atomically
from resume_adapters.errors import FencedOff, RunDirectoryUnusable

LAST_GENERATION = 10**12 - 1
"""No run has more starts; what says so was not written by one."""


def next_generation(known: int, where: object) -> int:
    """Return the generation after the highest that is known.

    Args:
        known: the highest one.
        where: what names it, for the error.

    Raises:
        RunDirectoryUnusable: no later start could read it.
    """
    if known >= LAST_GENERATION:
        raise RunDirectoryUnusable(
            f"{where} says that start {known} has been there; expected fewer: no run has "
            "started that often. Somebody else has written it: remove it, then launch the same command again"
        )
    return known + 1


class _Generation(msgspec.Struct, kw_only=True, omit_defaults=True):
    generation: Annotated[int, msgspec.Meta(ge=0, le=LAST_GENERATION)]
    token: str
    host: str = ""
    pid: int = 0
    job: str = ""
    started: Time = 0.0

    def __str__(self) -> str:
        job = f"job {self.job}, " if self.job else ""
        where = f" ({job}process {self.pid} on {self.host})" if self.pid else ""
        return f"start {self.generation}{where}"


# Made here, once: msgspec crashes where two threads are the first to decode the same class.
_decode = msgspec.json.Decoder(_Generation).decode


class Fencing:
    """The generation and the token of one start.

    Args:
        storage: the file operations.
        directory: the ``.resume`` directory.
        clock: returns seconds since 1970.
    """

    def __init__(self, storage: Storage, directory: Path, clock: Callable[[], float]) -> None:
        self._storage = storage
        self._run_directory = directory.parent
        self._file = directory / "generation"
        self._clock = clock
        self.token = uuid.uuid4().hex

    def generation(self) -> int:
        """Return the number of starts of the run directory so far."""
        current = self._read_generation()
        return current.generation if current else 0

    def take_over(self, after: int = 0) -> int:
        """Take the next generation for this start; from now on, earlier starts cannot commit.

        Args:
            after: the highest generation among the run's other directories.

        Raises:
            RunDirectoryUnusable: somebody has written a generation that no start can have had.
        """
        generation = next_generation(max(self.generation(), after), self._file)
        taken = _Generation(
            generation=generation,
            token=self.token,
            host=socket.gethostname(),
            pid=os.getpid(),
            job=job_number(),
            started=self._clock(),
        )
        self._write(msgspec.json.encode(taken))
        return generation

    def _write(self, content: bytes) -> None:
        try:
            write_atomically(self._storage, self._file, content)
        except FileNotFoundError:  # a start at the same moment has removed the temporary file, as a leftover
            write_atomically(self._storage, self._file, content)

    def require_owned(self, generation: int) -> None:
        """Check that no later start has taken the run directory over.

        Raises:
            FencedOff: a later start has, or the token is gone.
        """
        if not self.is_owned():
            self._raise_fenced_off(generation)

    def require_latest(self, generation: int) -> None:
        """Check on a rank that does not lead the run directory that no later start has taken it over.

        Raises:
            FencedOff: a later start has.
        """
        if self.generation() > generation:
            self._raise_fenced_off(generation)

    def _raise_fenced_off(self, generation: int) -> NoReturn:
        current = self._read_generation()
        owner = "nobody (its token is gone)" if current is None else str(current)
        raise FencedOff(
            f"this process is start {generation} of {self._run_directory}, which {owner} owns now: nothing more "
            "is committed from here. Two jobs were started on one run directory; the later one continues",
            path=self._run_directory,
        )

    def no_start_from_now(self) -> Callable[[], None]:
        """Return a fence for a process that changes a run directory without starting the run.

        It raises :class:`FencedOff` once another start has taken the run directory over.
        """
        before = self._read_generation()

        def fence() -> None:
            current = self._read_generation()
            if current != before:
                raise FencedOff(
                    f"{current or 'another process'} has taken {self._run_directory} over meanwhile: nothing more is "
                    "changed from here. Wait for it to end, then give the same command again",
                    path=self._run_directory,
                )

        return fence

    def is_owned(self) -> bool:
        """Return whether no later start has taken the run directory over."""
        current = self._read_generation()
        return current is not None and current.token == self.token

    def later_start(self) -> str | None:
        """Return a description of the later start that took the run directory over; ``None`` if none did."""
        current = self._read_generation()
        return None if current is None or current.token == self.token else str(current)

    def _read_generation(self) -> _Generation | None:
        try:
            return _decode(self._storage.read(self._file))
        except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None


class Leftovers:
    """Counts what one start could not remove, and warns once for each.

    A container that ran as another user may have left files in an old checkpoint, or NFS keeps a file that is still
    open. Training goes on; the next start tries again.
    """

    def __init__(self) -> None:
        self._found: set[Path] = set()

    def __len__(self) -> int:
        return len(self._found)

    def add(self, path: Path, error: OSError | None) -> None:
        """Count what could not be removed; ``None`` for an error: it is removed.

        Args:
            path: what was to be removed.
            error: the first of the errors.
        """
        if error is None or path in self._found:
            return
        self._found.add(path)
        logger.warning(
            "%s could not be removed: %s: %s. The run continues, and the next start tries again; remove it yourself to "
            "free its space.",
            path.name,
            error.filename or path,
            error.strerror,
        )


_LONGEST = 200
"""Characters of a reason that are read."""


class StopFile:
    """``.resume/stop``: while it exists, a stop is requested; its content is the reason.

    Args:
        storage: the file operations.
        directory: the ``.resume`` directory.
    """

    def __init__(self, storage: Storage, directory: Path) -> None:
        self._storage = storage
        self.path = directory / "stop"

    def request(self, reason: str) -> None:
        """Ask the run to stop."""
        write_atomically(self._storage, self.path, reason.encode())

    def reason(self) -> str | None:
        """Return why the file asks the run to stop; ``None`` if there is no such file.

        Raises:
            OSError: the file system cannot tell whether there is one.
        """
        try:
            written = self._storage.read(self.path).decode(errors="replace").strip()
        except (FileNotFoundError, IsADirectoryError):
            return None
        except PermissionError:  # of the file, whose name is the request; or of the directory, which is no answer
            if not any(each.name == self.path.name for each in self._storage.entries(self.path.parent)):
                return None
            written = ""
        return written[:_LONGEST] or f"{self.path.name} in {self.path.parent.name}"

    def withdraw(self) -> None:
        """Remove the request."""
        if self._storage.is_file(self.path):
            self._storage.remove_file(self.path)


class ControlDirectory:
    """The files of a run directory that belong to the run, not to one checkpoint.

    Args:
        storage: the file operations.
        run_directory: where the run's checkpoints are.
        clock: returns seconds since 1970.
    """

    def __init__(self, storage: Storage, run_directory: Path, clock: Callable[[], float]) -> None:
        self.path = run_directory / CONTROL
        self.clock = clock
        self.journal = Journal(storage, self.path, clock)
        self.fencing = Fencing(storage, self.path, clock)
        self.status = StatusFile(storage, self.path, self.journal)
        self.stop_file = StopFile(storage, self.path)
        self.leftovers = Leftovers()
