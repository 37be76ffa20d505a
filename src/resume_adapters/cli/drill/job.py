"""One launch of a command: started in a session of its own, followed by its trace, paused, killed, signalled.

The processes pause by themselves at the points that RESUME_ADAPTERS_PAUSE names, so a signal reaches them exactly
there.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil

from resume_adapters.cli.drill.faults import Fault
from resume_adapters.core.session.options import RUN_DIRECTORY, SAVE_EVERY
from resume_adapters.errors import ResumeError

PLACEHOLDER = "{run_dir}"
"""What stands in a command for its run directory."""

Event = dict[str, Any]
"""One line of a trace: the keys ``event``, ``time`` (seconds since 1970), ``rank``, and what belongs to the event."""


@dataclass(frozen=True)
class LaunchTrace:
    """What all ranks traced in one launch.

    Attributes:
        number: the launch, from 1.
        events: each rank's in the order in which they happened.
        fault: what was to happen to it.
        struck: whether that did; the run may be over before.
    """

    number: int
    events: tuple[Event, ...]
    fault: Fault | None = None
    struck: bool = False

    def of(self, *kinds: str) -> Iterator[Event]:
        """Yield the events of these kinds."""
        return (event for event in self.events if event["event"] in kinds)

    @property
    def resumed_from(self) -> int | None:
        """The step that it resumed from, 0 for a fresh start; ``None`` if it ended before it knew."""
        return next((event["step"] for event in self.of("start")), None)

    @property
    def last_step(self) -> int:
        """The last step that any rank did; 0 without one."""
        return max((event["step"] for event in self.of("step")), default=0)

    @property
    def world_size(self) -> int:
        """The number of ranks; 0 if it ended before it knew."""
        return max((event["world_size"] for event in self.of("start")), default=0)


def loss_of(step: Event) -> float | None:
    """Return the mean loss of the micro-batches of a step; ``None`` if the script gives none."""
    losses = [float.fromhex(each) for each in step.get("loss") or () if each is not None]
    return sum(losses) / len(losses) if losses else None


@dataclass(frozen=True)
class Run:
    """What the launches of one run traced, in order."""

    launches: tuple[LaunchTrace, ...]

    @property
    def steps(self) -> list[Event]:
        """Every step of every launch, also those that were done twice, with the number of the ``launch``."""
        return [{**step, "launch": launch.number} for launch in self.launches for step in launch.of("step")]

    def of(self, *kinds: str) -> Iterator[Event]:
        """Yield the events of these kinds, of all launches."""
        return (event for launch in self.launches for event in launch.of(*kinds))

    @property
    def losses(self) -> dict[int, float]:
        """For each step its loss, averaged over the ranks; of a step that was done twice, the last."""
        found: dict[int, dict[int, float]] = {}
        for step in self.steps:
            if (loss := loss_of(step)) is not None:
                found.setdefault(step["step"], {})[step["rank"]] = loss
        return {step: sum(losses.values()) / len(losses) for step, losses in sorted(found.items())}


def placed(command: Iterable[str], run_directory: Path, save_every: int | None) -> tuple[list[str], dict[str, str]]:
    """Return a command that saves into a run directory, and the environment variables that it needs for that."""
    words = list(command)
    variables = {} if any(PLACEHOLDER in word for word in words) else {RUN_DIRECTORY: str(run_directory)}
    if save_every is not None:
        variables[SAVE_EVERY] = str(save_every)
    return [word.replace(PLACEHOLDER, str(run_directory)) for word in words], variables


def require_inside(start: Event, run_directory: Path) -> None:
    """Require that a launch, which has traced its start, saves into a run directory or below it.

    Raises:
        DrillFailed: it saves elsewhere.
    """
    found = Path(start["run_directory"])
    if not found.resolve().is_relative_to(run_directory.resolve()):
        raise DrillFailed(
            f"the command saves into {found}; expected it to save into {run_directory}: write {PLACEHOLDER} into the "
            "command, in place of the directory",
            path=found,
        )


class TraceReader:
    """Reads the trace files of one launch while they grow.

    Args:
        file: the file of rank 0; those of other ranks lie beside it.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.events: list[Event] = []
        self._offsets: dict[Path, int] = {}

    def read(self) -> list[Event]:
        """Return the events that were written since the last call. The last line of a file may be incomplete."""
        new: list[Event] = []
        for file in (self.file, *sorted(self.file.parent.glob(f"{self.file.name}.rank-*"))):
            if file.exists():
                with file.open("rb") as stream:
                    offset = stream.seek(self._offsets.get(file, 0))
                    content = stream.read()
                whole = content[: content.rfind(b"\n") + 1]
                self._offsets[file] = offset + len(whole)
                new += map(json.loads, whole.splitlines())
        self.events += new
        return new


_MARKER = "RESUME_ADAPTERS_DRILL"
"""The environment variable by which every process of a launch is found, wherever it moved."""

_POLL = 0.02
"""Seconds between two looks at a launch; its processes wait where they pause."""

_SLOW_POLL = 0.25
"""Seconds between two searches for the processes that outlive a command; each reads every process of the machine."""

_LEAVE = 60.0
"""Seconds that processes have to leave when the command has ended, or its launcher was killed."""

_LINES = 15
"""How many lines of a log an error shows."""

_REPORT = "failed (exitcode: "
"""What torchrun prints when a rank has failed, followed by a page of its own traceback."""


class DrillFailed(ResumeError, RuntimeError):
    """A drill could not judge: a launch failed or hung by itself, or nothing could be compared."""

    exit_code = 4


class Job:
    """One launch of a command.

    Args:
        command: what to launch.
        environment: its environment, without what the trace needs.
        directory: for its output and its traces.
        number: which launch of the run, from 1.
        timeout: seconds without a line of the trace after which it counts as hanging.
        on_event: called with each event of its trace.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        directory: Path,
        number: int,
        timeout: float,
        on_event: Callable[[Event], object],
    ) -> None:
        trace = directory / f"launch-{number:02}.trace.jsonl"
        self.log = directory / f"launch-{number:02}.log"
        self.number = number
        self.timeout = timeout
        self.on_event = on_event
        self._reader = TraceReader(trace)
        self._pids: dict[int, int] = {}  # of each rank
        self._paused: dict[str, set[int]] = {}  # for each point the ranks that wait there
        self._last_line = time.monotonic()
        self._marker = str(trace)
        variables = {"RESUME_ADAPTERS_TRACE": str(trace), _MARKER: self._marker, "PYTHONFAULTHANDLER": "1"}
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                env={**environment, **variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The process that was launched."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code of the command; ``None`` while it runs."""
        return self._process.poll()

    @property
    def trace(self) -> LaunchTrace:
        """What it traced so far."""
        return LaunchTrace(self.number, tuple(self._reader.events))

    def wait(self, points: Collection[str], until: Callable[[], bool] = lambda: False) -> str | None:
        """Wait until all processes that a point concerns are paused there; continue those that pause elsewhere.

        Args:
            points: as RESUME_ADAPTERS_PAUSE names them.
            until: returns whether enough was seen.

        Returns:
            The point; or ``None`` when enough was seen, or the command has ended, and all its processes with it.

        Raises:
            DrillFailed: it hangs.
        """
        ended: float | None = None
        while True:
            self._read()
            if until():
                return None
            for point, ranks in list(self._paused.items()):
                if point not in points:
                    self._continue(ranks)
                elif self._concerned(point) <= ranks and all(map(self._is_stopped, ranks)):
                    return point
            if ended is None and self._process.poll() is not None:
                ended = time.monotonic()
            if ended is not None and (not self._alive() or time.monotonic() - ended > _LEAVE):
                self.kill_all()
                return None
            if ended is None and time.monotonic() - self._last_line > self.timeout:
                self._report_hang()
            time.sleep(_POLL if ended is None else _SLOW_POLL)

    def kill_all(self) -> None:
        """Kill every process of the launch, as when the machine dies."""
        while processes := self._alive():
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(processes, timeout=1.0)
        self._process.wait()
        self._read()

    def signal(self, number: signal.Signals, rank: int | None) -> None:
        """Send a signal to one rank, or only to the process that was launched; then continue all that wait."""
        if rank is None:
            self._process.send_signal(number)
        else:
            os.kill(self._pids[rank], number)
        self.continue_all()

    def continue_all(self) -> None:
        """Continue the ranks that are paused."""
        self._continue(self._pids)

    def require_success(self) -> None:
        """Require that the command, which has ended, did so with exit code 0.

        Raises:
            DrillFailed: it did not.
        """
        if (code := self._process.returncode) != 0:
            after = f"after step {self.trace.last_step}, and not by a fault of the drill"
            self._fail(f"ended with exit code {code} {after}")

    def last_lines(self) -> str:
        """Return the last lines that its processes printed, without what a launcher reports of their failure."""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        reported = next((number for number, line in enumerate(lines) if _REPORT in line), len(lines))
        return "\n".join(lines[:reported][-_LINES:])

    def _fail(self, what: str) -> NoReturn:
        raise DrillFailed(f"launch {self.number} {what}. The end of {self.log}:\n{self.last_lines()}", path=self.log)

    def _read(self) -> None:
        for event in self._reader.read():
            self._last_line = time.monotonic()
            if event["event"] == "start":
                self._pids[event["rank"]] = event["pid"]
            elif event["event"] == "paused":
                self._paused.setdefault(event["at"], set()).add(event["rank"])
            self.on_event(event)

    def _concerned(self, point: str) -> set[int]:
        """Return the ranks that pause at a point."""
        where, _, rank = point.partition("@")
        return {int(rank)} if rank else set(range(self.trace.world_size if where.startswith("step:") else 1))

    def _is_stopped(self, rank: int) -> bool:
        """Return whether a rank, which has traced that it pauses, has done so, or is gone."""
        try:
            return psutil.Process(self._pids[rank]).status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return True

    def _continue(self, ranks: Iterable[int]) -> None:
        for rank in list(ranks):
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(self._pids[rank])
                if process.status() == psutil.STATUS_STOPPED:
                    process.resume()
                    for waiting in self._paused.values():
                        waiting.discard(rank)

    def _alive(self) -> list[psutil.Process]:
        """Return the processes of the launch that are alive, those that started others first."""
        found: dict[int, psutil.Process] = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            launched = psutil.Process(self.pid)
            found = {process.pid: process for process in [launched, *launched.children(recursive=True)]}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.pid not in found and process.environ().get(_MARKER) == self._marker:
                    found[process.pid] = process
        return [process for process in found.values() if _is_alive(process)]

    def _report_hang(self) -> NoReturn:
        for pid in self._pids.values() or [self.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGABRT)  # faulthandler writes the stack of each thread to the log
        self.continue_all()
        time.sleep(1.0)
        self._fail(f"hangs: it traced nothing for {self.timeout:.0f} s after step {self.trace.last_step} (--timeout)")


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
