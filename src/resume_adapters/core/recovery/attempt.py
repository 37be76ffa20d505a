"""One attempt at a block: what the user's function and its hooks get, and what a training call asks of it."""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from msgspec.structs import replace

from resume_adapters.core.ranks import Ranks
from resume_adapters.core.recovery.hang import Pulse
from resume_adapters.core.recovery.plan import Failure, HeldCheckpoint, Level, Moment, Report
from resume_adapters.core.recovery.updates import UpdateWatch
from resume_adapters.core.stop.signals import StopFlag
from resume_adapters.core.storage.groups import StorageGroup
from resume_adapters.errors import Hung, PeerFailed, ResumeError, SaveFailed

_SURE = 2
"""Steps after which every rank holds a later state than the one in memory: it took part in the second."""


class LeftByPeer(BaseException):
    """Leads out of an attempt that another rank has failed in. Not an ``Exception``: nobody is to catch it."""


@dataclass(frozen=True)
class Attempt:
    """What a restartable function is called with.

    Attributes:
        number: 0 the first time in a process.
        level: how it goes on after the failure of the attempt before; ``None`` the first time.
        failure: what went wrong there; ``None`` the first time.
        reason: why not at a cheaper level; empty where there is none.
    """

    number: int = 0
    level: Level | None = None
    failure: Failure | None = None
    reason: str = ""


class HeldTraining(Protocol):
    """A training call that holds its state at the end of each step."""

    @property
    def directory(self) -> Path:
        """The run directory."""

    @property
    def generation(self) -> int:
        """The start of the run directory that this call is."""

    @property
    def progress(self) -> int:
        """Optimizer steps completed."""

    @property
    def flag(self) -> StopFlag:
        """Whether it was asked to stop."""

    @property
    def has_committed(self) -> bool:
        """Whether there is a checkpoint on the disk that is later than what it has resumed from."""

    @property
    def is_over(self) -> bool:
        """Whether it was closed before anything failed."""

    def report(self, *, is_updating: bool) -> Report:
        """Return what is held, and why it cannot be used.

        Args:
            is_updating: the weights may be those of the middle of a step.
        """

    def write(self, memory: Path, ranks: Ranks, group: StorageGroup, name: Moment | None, source: int | None) -> Path:
        """Write the state that is held as a checkpoint into a directory, and return its path. Every rank calls it.

        Args:
            memory: the directory, of the same name on each node.
            ranks: the ranks of the block.
            group: those that share this rank's directory.
            name: the moment that all ranks hold.
            source: the rank whose weights all take; ``None``: each has its own.
        """

    def save(self, ranks: Ranks, name: Moment | None, source: int | None) -> str:
        """Commit the state that is held in the run directory, where that is not done; return the checkpoint's name.

        Every rank calls it.

        Args:
            ranks, name, source: as :meth:`write` has them; no name: what it has resumed from, in memory.

        Raises:
            ResumeError: it could not be saved.
        """

    def give_up(self, failure: Failure) -> None:
        """Write into the status of the run that it has failed, and why."""

    def close(self) -> None:
        """Undo what the call patched, started and registered, if that is not done."""


class RunningAttempt:
    """An attempt that is under way.

    Args:
        attempt: what the user's function is called with.
        memory: the checkpoints to go on from, by run directory.
        updates: whether weights are being updated.
        announce: lets all ranks know that this one has failed; returns whether it is the first.
        cut: ends what this rank waits for.
        forget: removes the checkpoints in memory, which are needed no more.
        began: when the failure of the attempt before was seen, by ``time.monotonic``.
        flags: the stop flags of the calls that attempts before this one have left, by run directory.

    Attributes:
        attempt: see above.
        updates: see above.
        is_left: a rank has failed, and all leave.
        left: when this rank learned of it, by ``time.monotonic``.
        is_origin: this rank has failed first.
        error: with which it has left; ``None`` as long as it has not, and where a peer made it leave.
        pulse: when the training has last done something.
        hang: what was found where a rank hangs.
    """

    def __init__(
        self,
        attempt: Attempt,
        memory: dict[Path, HeldCheckpoint],
        updates: UpdateWatch,
        announce: Callable[[], bool],
        cut: Callable[[], object],
        forget: Callable[[], object],
        began: float,
        flags: Mapping[Path, StopFlag] = MappingProxyType({}),
    ) -> None:
        self.attempt = attempt
        self.updates = updates
        self.pulse = Pulse()
        self.hang: Failure | None = None
        self.is_left = self.is_origin = False
        self.left = 0.0
        self.error: BaseException | None = None
        self._memory = memory
        self._announce = announce
        self._cut = cut
        self._forget = forget
        self._began: float | None = None if attempt.level is None else began
        self._flags = flags
        self._trainings: list[HeldTraining] = []
        self._steps = 0

    # ---- What a training call asks

    def resume_option(self, given: str | os.PathLike[str]) -> str | os.PathLike[str]:
        """Return what a run is to resume from: a start from scratch was asked of the first attempt alone."""
        return "auto" if self.attempt.level is not None and given in ("scratch", "scratch!") else given

    def memory(self, directory: Path) -> HeldCheckpoint | None:
        """Return the checkpoint in memory that a run resumes from; ``None`` for what is on the disk."""
        return self._memory.get(directory)

    def all_memory(self) -> dict[Path, HeldCheckpoint]:
        """Return the checkpoints in memory that runs resume from, by run directory; none once there is a later one."""
        return {} if any(each.has_committed for each in self._trainings) else dict(self._memory)

    def kept(self, kept: Mapping[str, HeldCheckpoint]) -> dict[Path, HeldCheckpoint]:
        """Return where this node has checkpoints in memory that all ranks go on from."""
        return {
            Path(path): replace(self._memory.get(Path(path), each), generation=each.generation)
            for path, each in kept.items()
        }

    def resumed(self, directory: Path, generation: int) -> None:
        """Note that a run has resumed from memory, and under which generation it goes on."""
        self._memory[directory] = HeldCheckpoint(self._memory[directory].path, generation)

    def former_flag(self, directory: Path) -> StopFlag | None:
        """Return the stop flag of the call on a run directory that an attempt before has left; ``None``: none has."""
        return self._flags.get(directory)

    def add(self, training: HeldTraining) -> None:
        """Register a training call."""
        self._trainings.append(training)

    def end_step(self) -> float | None:
        """Count a step of which the state is held now.

        Returns:
            The seconds since the failure, the first time after one.

        Raises:
            LeftByPeer: another rank has failed.
        """
        self.updates.end_step()
        self.pulse.end_step()
        self.require_peers()
        self._steps += 1
        if self._steps == _SURE and self.attempt.level is not None:
            self._memory.clear()
            self._forget()
        began, self._began = self._began, None
        return None if began is None else time.monotonic() - began

    def require_peers(self) -> None:
        """Leave where another rank has failed.

        Raises:
            LeftByPeer: one has.
        """
        if self.is_left:
            raise LeftByPeer

    def fail(self, error: BaseException) -> None:
        """Ask all ranks to leave: this one has failed, and is about to undo what it did.

        Args:
            error: why; the first counts, since undoing what was cut fails too.
        """
        if self.error is None:
            self.error = error
        if not self.is_left:
            self.is_origin = self._announce() or self.is_origin  # another thread may have
            self.leave()

    def fail_by_hang(self, hang: Failure) -> None:
        """Ask all ranks to leave, because one of them hangs; the thread calls it that watches over this one."""
        step = None if self.training is None else self.training.progress
        self.hang = replace(hang, step=step)
        self.fail(Hung(f"{hang.message}. The stacks of all ranks that answer are in their log", step=step))

    def leave(self) -> None:
        """End what this rank waits for; any thread may call it."""
        if not self.is_left:
            self.is_left, self.left = True, time.monotonic()
            self._cut()

    # ---- What the block asks

    @property
    def training(self) -> HeldTraining | None:
        """The training call that was begun last; ``None`` before the first."""
        return self._trainings[-1] if self._trainings else None

    def report(self, failure: Failure | None, has_memory: Callable[[HeldCheckpoint], bool]) -> Report:
        """Return what this rank says after a failure.

        Args:
            failure: its own; ``None`` where it has left because of another rank.
            has_memory: returns whether a checkpoint in memory is still there.
        """
        memory = self.all_memory()
        kept = {str(path): each for path, each in memory.items()} if all(map(has_memory, memory.values())) else {}
        training = self.training
        if training is None:
            return Report(failure=failure, kept=kept)
        report = training.report(is_updating=self.updates.is_updating)
        running = [each for each in self._trainings if not each.is_over]
        if sum(each.report(is_updating=False).moment is not None for each in running) > 1:
            objection = report.objection or "several trainings are under way at once, and one alone is held"
            report = replace(report, objection=objection, former=())
        return replace(report, failure=failure, kept=kept)

    def failure(self, error: BaseException, rank: int) -> Failure:
        """Return an error as data."""
        if self.hang is not None:
            return self.hang
        last = traceback.extract_tb(error.__traceback__)[-1:]
        place = f"{last[0].filename}:{last[0].lineno}" if last else ""
        step = None if self.training is None else self.training.progress
        is_final = isinstance(error, ResumeError) and not isinstance(error, PeerFailed | SaveFailed)
        return Failure(rank, step, type(error).__name__, str(error), place, is_final)

    def flags(self) -> dict[Path, StopFlag]:
        """Return the stop flags of the calls that have taken their run directory over, in this attempt and before."""
        return {**self._flags, **{each.directory: each.flag for each in self._trainings if each.generation}}

    def close(self) -> None:
        """Close the training calls that the failure has left open."""
        for each in self._trainings:
            each.close()

    def release(self) -> None:
        """Forget the training calls, and what they hold."""
        self._trainings.clear()
        self.error = None


_running: list[RunningAttempt] = []


def running_attempt() -> RunningAttempt | None:
    """Return the attempt that is under way in this process; ``None`` outside a restartable block."""
    return _running[-1] if _running else None


@contextlib.contextmanager
def under_way(attempt: RunningAttempt) -> Iterator[None]:
    """Show training calls an attempt while the context lasts."""
    _running.append(attempt)
    try:
        yield
    finally:
        _running.remove(attempt)


_between_attempts: list[Callable[[], object]] = []


def between_attempts(reset: Callable[[], object]) -> None:
    """Register what is called between two attempts: it resets what a framework keeps for the whole process."""
    if reset not in _between_attempts:
        _between_attempts.append(reset)


def reset_process() -> None:
    """Call what :func:`between_attempts` was given."""
    for each in _between_attempts:
        each()
