"""The launches of a run, by its journal: how each ended, which made no progress, and where the wall time went.

Pure: no clock, no disk. Any version of this package may have written the journal.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from resume_adapters.core.run_directory.status import RunState, RunStatus
from resume_adapters.core.stop.policy import is_warning

_ENDS = {each.value for each in (RunState.FINISHED, RunState.STOPPED, RunState.HALTED, RunState.FAILED)}


class Launch(msgspec.Struct):
    """One launch of a run.

    Attributes:
        generation: which start of the run directory it was.
        resumed_from: the step that it resumed from.
        began: when it had chosen what to resume from, in seconds since 1970.
        trained_from: when it began to train; ``None`` if it did not come to that.
        ended: when it ended, or was last seen.
        how: ``finished``, ``stopped``, ``halted``, ``failed``, ``killed`` or ``running``.
        reason: why it ended, as far as it is known.
        step: the last step that is known of it.
        kept: how many of its steps no later launch did again.
        saves: checkpoints that it committed.
        save_seconds: from the beginning of these saves to their commits, together.
        recoveries: failures after which it went on in its processes.
        repeated: steps that these cost.
        has_progressed: it has committed a later step than it resumed from; or the run was over, or a person has rewound
            it or let it go on.
    """

    generation: int
    resumed_from: int
    began: float
    trained_from: float | None = None
    ended: float = 0.0
    how: str = RunState.KILLED.value
    reason: str = ""
    step: int = 0
    kept: int = 0
    saves: int = 0
    save_seconds: float = 0.0
    recoveries: int = 0
    repeated: int = 0
    has_progressed: bool = False

    def add(self, entry: Mapping[str, Any]) -> None:
        """Count an entry of the journal between its start and the next one."""
        event = entry["event"]
        committed = event == "commit" and (entry.get("step") or 0) > self.resumed_from
        # `resume-adapters stop --undo` adds a stop to a launch that was halted.
        released = event == RunState.STOPPED.value and self.how == RunState.HALTED.value
        self.has_progressed |= committed or released or event in (RunState.FINISHED.value, "rewind")
        if event in ("rewind", "mirror", "mirror-behind", "mirror-ended"):  # by somebody else, or after its end
            return
        self.ended = max(self.ended, float(entry["time"]))
        self.step = max(self.step, entry.get("step") or 0)
        if event == RunState.RUNNING.value and self.trained_from is None:
            self.trained_from = float(entry["time"])
        elif event == "commit":
            self.saves += 1
            self.save_seconds += entry.get("seconds") or 0.0
        elif event == "recovery":
            self.recoveries += 1
            self.repeated += entry.get("lost") or 0
        elif event in _ENDS:
            self.how, self.reason = event, str(entry.get("reason") or "")

    def was_seen(self, step: int, at: float) -> None:
        """Note the last status of a launch that did not live to say how it ended."""
        self.step, self.ended = max(self.step, step), max(self.ended, at)

    @property
    def training(self) -> float:
        """Seconds from the beginning of its training to its end."""
        return 0.0 if self.trained_from is None else max(0.0, self.ended - self.trained_from)

    @property
    def productive(self) -> float:
        """Seconds of its training that went into steps that are kept, if each step takes as long."""
        done = self.step - self.resumed_from + self.repeated
        return self.training * min(1.0, self.kept / done) if done > 0 else 0.0


class Goodput(msgspec.Struct, frozen=True):
    """Where the wall time of a run went, in seconds, from the first launch to the end of the last.

    Attributes:
        kept: training of steps that are kept, with their saves and evaluations.
        repeated: training that was lost, and done again or still to be done again.
        starting: from where a launch has chosen its checkpoint to its training.
        away: between the launches: the queue, and the imports of the next one.
    """

    kept: float
    repeated: float
    starting: float
    away: float

    @property
    def share(self) -> float | None:
        """The share of the wall time that ended in steps that are kept; ``None`` before there is any."""
        wall = self.kept + self.repeated + self.starting + self.away
        return self.kept / wall if wall > 0 else None


def _each(history: Iterable[Mapping[str, Any]]) -> Iterator[Launch]:
    """Yield the launches of a run, oldest first, each when all of its entries are counted."""
    last: Launch | None = None
    for entry in history:
        if entry["event"] == "start":
            former = entry.get("former") or {}
            if last is not None:
                if former.get("generation") == last.generation:
                    last.was_seen(former["step"], former["updated"])
                yield last
            step, began = entry.get("step") or 0, float(entry["time"])
            last = Launch(entry.get("generation") or 0, step, began, ended=began, step=step)
        elif last is not None:
            last.add(entry)
    if last is not None:
        yield last


def launches(
    history: Iterable[Mapping[str, Any]], status: RunStatus | None, state: RunState, resumes_from: int
) -> list[Launch]:
    """Return the launches of a run, oldest first.

    Args:
        history: the entries of its journal, oldest first.
        status: the last status; ``None`` where it cannot be read.
        state: of the run, as it is seen from this process.
        resumes_from: the step that the next launch would resume from.
    """
    found = list(_each(history))
    if found and status is not None and status.generation == found[-1].generation:
        if state is RunState.RUNNING:
            found[-1].how = state.value
        if status.state is RunState.RUNNING:
            found[-1].was_seen(status.step, status.updated)
    if found:
        _count_kept(found, found[-1].step if found[-1].how == RunState.RUNNING.value else resumes_from)
    return found


def _count_kept(found: Sequence[Launch], reached: int) -> None:
    """Count the steps of each launch that no later one has done again, or has to."""
    for launch in reversed(found):
        launch.kept = max(0, min(launch.step, reached) - launch.resumed_from)
        reached = min(reached, launch.resumed_from)


def goodput(found: Sequence[Launch]) -> Goodput:
    """Return where the wall time of some launches went."""
    kept = sum(each.productive for each in found)
    training = sum(each.training for each in found)
    starting = sum((each.trained_from or each.ended) - each.began for each in found)
    away = sum(max(0.0, after.began - before.ended) for before, after in itertools.pairwise(found))
    return Goodput(kept, training - kept, starting, away)


_OUT_OF_MEMORY = ("OutOfMemoryError", "MemoryError", "out of memory", "not enough memory")
"""What the errors of torch, its allocators and Python say."""


class WastedLaunch(msgspec.Struct, frozen=True):
    """A launch that ended without progress.

    Attributes:
        generation: which start of the run directory it was.
        resumed_from: the step that it resumed from.
        ended: ``stopped``, ``halted``, ``failed``, or ``killed`` if it did not live to say how.
        step: the step at which it ended; ``None`` if it was killed.
        reason: why it ended, as far as it is known.
    """

    generation: int
    resumed_from: int
    ended: RunState
    step: int | None = None
    reason: str = ""

    @property
    def left_for_walltime(self) -> bool:
        """Whether it left because its time was nearly over."""
        return self.ended is RunState.STOPPED and is_warning(self.reason)

    @property
    def ran_out_of_memory(self) -> bool:
        """Whether it failed for lack of memory; a process that the system kills for it is only known as killed."""
        return self.ended is RunState.FAILED and any(words in self.reason for words in _OUT_OF_MEMORY)

    def __str__(self) -> str:
        step = "" if self.step is None else f" at step {self.step}"
        reason = self.reason.strip().partition("\n")[0]
        return f"start {self.generation} {_WORDS[self.ended]}{step}{f' ({reason})' if reason else ''}"


_WORDS = {
    RunState.STOPPED: "stopped",
    RunState.HALTED: "was halted",
    RunState.FAILED: "failed",
    RunState.KILLED: "was killed",
}


def wasted_launches(
    history: Iterable[Mapping[str, Any]], *, resumes_from: int | None = None, is_running: bool = False
) -> tuple[WastedLaunch, ...]:
    """Return the launches without progress that follow each other up to the last launch, oldest first.

    Progress, the end of the run, and a person who rewound the run or released a halted one begin the row again.

    Args:
        history: the entries of the journal, oldest first.
        resumes_from: the step that the next launch resumes from, if it is known: a launch that was killed right after a
            commit may have no entry of it.
        is_running: the last launch has not ended; only its progress counts.
    """
    row: list[Launch] = []
    for launch in _each(history):
        if row and (row[-1].has_progressed or launch.resumed_from > row[-1].resumed_from):
            row.clear()
        row.append(launch)
    if row and (row[-1].has_progressed or (resumes_from or 0) > row[-1].resumed_from):
        row.clear()
    return tuple(map(_described, row[:-1] if is_running else row))


def _described(launch: Launch) -> WastedLaunch:
    ended = RunState(launch.how)
    step = None if ended is RunState.KILLED else launch.step
    return WastedLaunch(launch.generation, launch.resumed_from, ended, step, launch.reason)
