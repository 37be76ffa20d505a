"""Start a training process, follow it through its trace, and kill it at a chosen moment."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from resume_adapters.cli.run_directory import STORAGE
from resume_adapters.core.checkpoint.catalog import candidates
from resume_adapters.core.checkpoint.layout import CheckpointState, state_of
from resume_adapters.errors import ResumeError

_POLL = 0.002
"""Seconds between two polls of a process; a save of the demo's model takes about twenty times as long."""


class DemoFailed(ResumeError, RuntimeError):
    """A training process of the demo failed, or ended before it could be killed."""


@dataclass(frozen=True)
class Kill:
    """When to kill: as soon as ``step`` is done or, with ``inside_save``, in the first save after it."""

    step: int
    inside_save: bool


@dataclass(frozen=True)
class Point:
    """One step as the training script traced it."""

    step: int
    loss: float
    learning_rate: float


@dataclass(frozen=True)
class Launch:
    """What one process did: the steps it traced and, if it was killed, the last step before."""

    points: tuple[Point, ...]
    killed_at: int | None = None
    inside_save: bool = False
    pending: str | None = None


def choose(seed: int, steps: int, save_steps: int) -> list[Kill]:
    """Choose three moments, one in each third of the run, with a save before each. One of them is inside a save."""
    rng = random.Random(seed)
    inside = rng.randrange(3)
    kills = []
    for third in range(3):
        window = range(third * steps // 3 + save_steps + 2, (third + 1) * steps // 3 - save_steps + 1)
        fit = [step for step in window if (step % save_steps == 0) == (third == inside)]
        kills.append(Kill(rng.choice(fit), third == inside))
    return kills


class Process:
    """One training process, from launch to end.

    Args:
        command: what to launch.
        env: its environment.
        log: file for its output.
        trace: file to which it appends a line of JSON for each step.
        run_dir: its run directory.
        advance: called with each completed step.
    """

    def __init__(
        self,
        command: list[str],
        env: Mapping[str, str],
        log: Path,
        trace: Path,
        run_dir: Path,
        advance: Callable[[int], object],
    ) -> None:
        self.command, self.env, self.log, self.trace = command, env, log, trace
        self.run_dir = run_dir
        self.advance = advance
        self.points: list[Point] = []

    def run(self, kill: Kill | None = None) -> Launch:
        """Launch it, and wait until it ends, or kill it.

        Raises:
            DemoFailed: it failed, or ended before it could be killed.
        """
        offset = self.trace.stat().st_size if self.trace.exists() else 0
        with self.log.open("ab") as log:
            process = subprocess.Popen(self.command, env=self.env, stdout=log, stderr=subprocess.STDOUT)
            try:
                return self._watch(process, kill, offset)
            finally:
                process.kill()
                process.wait()

    def _watch(self, process: subprocess.Popen[bytes], kill: Kill | None, offset: int) -> Launch:
        while True:
            code = process.poll()
            offset = self._read_trace(offset)
            last = self.points[-1].step if self.points else 0
            if code is not None:
                self._require_end(code, kill)
                return Launch(tuple(self.points))
            if kill is not None and last >= kill.step:
                pending = self._freeze_inside_save(process) if kill.inside_save else None
                if pending is not None or not kill.inside_save:
                    process.send_signal(signal.SIGKILL)
                    process.wait()
                    self._read_trace(offset)
                    return Launch(tuple(self.points), self.points[-1].step, kill.inside_save, pending)
            time.sleep(_POLL)

    def _freeze_inside_save(self, process: subprocess.Popen[bytes]) -> str | None:
        """Freeze the process if it is saving, and return the pending checkpoint; otherwise let it continue."""
        if self._pending() is None:
            return None
        # Freeze it first, then check again: the save may have been committed in between.
        process.send_signal(signal.SIGSTOP)
        time.sleep(5 * _POLL)
        pending = self._pending()
        if pending is None:
            process.send_signal(signal.SIGCONT)
        return pending

    def _pending(self) -> str | None:
        """Return the name of the pending checkpoint."""
        found = candidates(STORAGE, self.run_dir)
        return next((path.name for path in found if state_of(STORAGE, path) is CheckpointState.PENDING), None)

    def _read_trace(self, offset: int) -> int:
        """Read the complete lines from ``offset`` on, and return where they end."""
        if not self.trace.exists():
            return offset
        with self.trace.open("rb") as file:
            file.seek(offset)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        for line in whole.splitlines():
            self.points.append(Point(**json.loads(line)))
            self.advance(self.points[-1].step)
        return offset + len(whole)

    def _require_end(self, code: int, kill: Kill | None) -> None:
        last = self.points[-1].step if self.points else 0
        if code != 0:
            lines = self.log.read_text(errors="replace").strip().splitlines()
            raise DemoFailed(
                f"the training process ended with exit code {code} after step {last}: {lines[-1] if lines else ''} "
                f"(its output is in {self.log})",
                path=self.log,
            )
        if kill is not None:
            where = "inside a save " if kill.inside_save else ""
            raise DemoFailed(
                f"the run ended before it could be killed {where}from step {kill.step} on: run the demo again with "
                "another --seed",
                path=self.log,
            )
