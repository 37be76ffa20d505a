"""The lines of a trace, and what a run writes of its saves, its prunes and its end.

A line is on its way to the disk when the event that it reports has happened, so a SIGKILL loses none. The file
operations of a save are counted from its begin to its commit, those of a prune likewise, and the process stops itself
before the operation that a pause point names.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from resume_adapters.core.checkpoint.layout import MANIFEST
from resume_adapters.core.storage.base import Storage, counting_storage
from resume_adapters.core.storage.local import LocalStorage
from resume_adapters.core.trace.points import PAUSE, PausePoint, points_of_rank
from resume_adapters.errors import UnsupportedSetting

FILE, EVERY = "RESUME_ADAPTERS_TRACE", "RESUME_ADAPTERS_TRACE_EVERY"
"""The environment variables: the file to append to, and the steps between two digests of weights and optimizers."""

_EVERY = 10


class TraceLog:
    """The trace of one rank.

    Args:
        file: the file to append to.
        points: where this rank stops itself.
        every: steps between two digests of weights and optimizers.
        clock: returns seconds since 1970.
        uncounted: names of threads whose file operations are not counted: they work by the clock.

    Attributes:
        rank: this rank.
        every: steps between two digests of weights and optimizers.
    """

    def __init__(
        self,
        file: Path,
        rank: int,
        points: list[PausePoint],
        *,
        every: int,
        clock: Callable[[], float],
        uncounted: Collection[str],
    ) -> None:
        self.rank = rank
        self.every = every
        self._file = file
        self._storage = LocalStorage()
        self._points = points
        self._clock = clock
        self._uncounted = uncounted
        self._work = ""
        self._step = 0
        self._operations = 0

    def write(self, event: str, **facts: Any) -> None:
        """Append one line; facts that are ``None`` are left out."""
        known = {name: value for name, value in facts.items() if value is not None}
        line = {"event": event, "time": self._clock(), "rank": self.rank, **known}
        self._storage.append(self._file, msgspec.json.encode(line) + b"\n")

    def counting(self, storage: Storage) -> Storage:
        """Return a storage that counts the file operations of saves and prunes, and pauses before those asked for."""
        return counting_storage(storage, self._before)

    # ---- Saves and prunes

    def begin_save(self, name: str, step: int) -> None:
        """Write that a save begins, and begin to count its file operations."""
        self.write("save", name=name, step=step)
        self._begin("save", step)

    def committed(self) -> None:
        """Write that the save under way is committed; called on the thread that commits."""
        operations = self._end()
        self.write("committed", step=self._step, operations=operations)

    @contextlib.contextmanager
    def pruning(self, names: Mapping[str, str]) -> Iterator[None]:
        """Count the file operations of a prune while the context lasts, and write a line at its end.

        Args:
            names: the checkpoints that are removed; where there are none, nothing is counted and written.
        """
        if not names:
            yield
            return
        self._begin("prune", self._step)
        yield
        operations = self._end()
        self.write("prune", names=list(names), operations=operations)

    def _begin(self, work: str, step: int) -> None:
        self._work, self._step, self._operations = work, step, 0

    def _end(self) -> int:
        """End the work, and pause at the points that lie behind its last operation."""
        work, self._work = self._work, ""
        for point in self._due(work, self._step):
            self._pause(point)
        return self._operations

    def _before(self, path: Path) -> None:
        if not self._work or threading.current_thread().name in self._uncounted:
            return
        self._operations += 1
        is_marker = self._work == "save" and path.name == MANIFEST  # the last chance before the commit
        for point in self._due(self._work, self._step):
            if is_marker or self._operations >= point.operation:
                self._pause(point)

    # ---- Pausing

    def reach(self, step: int) -> None:
        """Pause at the points that lie after this step."""
        for point in self._due("step", step):
            self._pause(point)

    def _due(self, work: str, step: int) -> list[PausePoint]:
        return [each for each in self._points if each.work == work and each.step <= step]

    def _pause(self, point: PausePoint) -> None:
        self._points.remove(point)
        self.write("paused", at=point.text)
        # To this very thread: one that is sent to the process may reach another first, and this one would go on.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def open_trace(
    environment: Mapping[str, str], rank: int, *, clock: Callable[[], float], uncounted: Collection[str]
) -> TraceLog | None:
    """Return the trace that the environment asks for; ``None`` where it asks for none.

    Args:
        rank: this rank. Rank zero has the file itself, each other rank one beside it.
        clock: returns seconds since 1970.
        uncounted: names of threads whose file operations are not counted.

    Raises:
        UnsupportedSetting: a variable is invalid, or there are pause points and no file.
    """
    given, points = environment.get(FILE), environment.get(PAUSE, "")
    if not given:
        if points:
            raise UnsupportedSetting(f"{PAUSE} is set and {FILE} is not: name the file that gets a line at each pause")
        return None
    every = environment.get(EVERY, str(_EVERY))
    if not every.isdecimal() or int(every) < 1:
        raise UnsupportedSetting(f"{EVERY}={every!r}; expected a positive number of steps")
    file = Path(os.path.abspath(given))
    return TraceLog(
        file if rank == 0 else file.with_name(f"{file.name}.rank-{rank:05d}"),
        rank,
        points_of_rank(points, rank),
        every=int(every),
        clock=clock,
        uncounted=uncounted,
    )
