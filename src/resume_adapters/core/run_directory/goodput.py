"""Where the wall time of a run went, by the history of its launches. Pure: no clock, no disk."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from resume_adapters.core.run_directory.status import RunState, RunStatus

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

    def add(self, entry: Mapping[str, Any]) -> None:
        """Count an entry of the journal between its start and the next one."""
        event = entry["event"]
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
    found: list[Launch] = []
    for entry in history:
        if entry["event"] == "start":
            former = entry.get("former") or {}
            if found and former.get("generation") == found[-1].generation:
                found[-1].was_seen(former["step"], former["updated"])
            step, began = entry.get("step") or 0, float(entry["time"])
            found.append(Launch(entry.get("generation") or 0, step, began, ended=began, step=step))
        elif found:
            found[-1].add(entry)
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
