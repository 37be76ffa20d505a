"""Fencing: a later start of a run directory locks an earlier one out.

``.resume/generation`` holds the number of starts and the token of the last one. A start commits, prunes and writes the
status only while its own token is in that file.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn

import msgspec

from resume_adapters.core.checkpoint.manifest import Time
from resume_adapters.core.run_directory.status import job_number
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
