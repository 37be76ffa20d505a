"""Launches without progress: those that ended without a committed checkpoint of a later step than they resumed from.

They are derived from the journal, which any version of this package wrote.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from resume_adapters.core.run_directory.status import RunState
from resume_adapters.core.stop.policy import is_warning

_ENDS = {state.value: state for state in (RunState.STOPPED, RunState.HALTED, RunState.FAILED)}

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
    row: list[_Launch] = []
    for entry in history:
        if entry["event"] != "start":
            if row:
                row[-1].add(entry)
            continue
        if row and row[-1].has_progressed(_step(entry)):
            row.clear()
        row.append(_Launch(entry))
    if row and row[-1].has_progressed(resumes_from or 0):
        row.clear()
    return tuple(launch.describe() for launch in (row[:-1] if is_running else row))


class _Launch:
    """What counts of the entries of one launch, from its start; a journal may have millions."""

    __slots__ = ("_end", "_has_progressed", "_start")

    def __init__(self, start: Mapping[str, Any]) -> None:
        self._start = start
        self._has_progressed = False
        self._end: Mapping[str, Any] | None = None

    def add(self, entry: Mapping[str, Any]) -> None:
        event = entry["event"]
        committed = event == "commit" and _step(entry) > _step(self._start)
        # `resume-adapters stop --undo` adds a stop to a launch that was halted.
        released = event == "stopped" and self._end is not None and self._end["event"] == "halted"
        self._has_progressed |= committed or released or event in ("finished", "rewind")
        if event in _ENDS:
            self._end = entry

    def has_progressed(self, following: int) -> bool:
        return self._has_progressed or following > _step(self._start)

    def describe(self) -> WastedLaunch:
        generation, resumed_from, end = int(self._start.get("generation", 0)), _step(self._start), self._end
        if end is None:
            return WastedLaunch(generation, resumed_from, RunState.KILLED)
        return WastedLaunch(generation, resumed_from, _ENDS[end["event"]], _step(end), str(end.get("reason", "")))


def _step(entry: Mapping[str, Any]) -> int:
    return entry.get("step") or 0
