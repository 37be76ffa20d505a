"""Which checkpoints a run has committed and not removed since, according to its journal. Pure: no disk.

What a run directory holds is not enough to know: a checkpoint that lost this package's files looks like one of the bare
framework, and a copy of a checkpoint looks like one that the run has committed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def subjects(entry: Mapping[str, Any]) -> list[str | int]:
    """Return the checkpoints that an entry of the journal commits or removes: names, or a step where it has no name.

    An entry ``rewind`` removes all of later steps; it names none.
    """
    event, name, step = entry["event"], entry.get("checkpoint"), entry.get("step")
    moved = entry.get("set_aside")
    if event in ("commit", "prune") and isinstance(name, str):
        return [name]
    if event == "commit" and isinstance(step, int):
        return [step]
    return [str(each) for each in moved] if event == "start" and isinstance(moved, list) else []


class CommitHistory:
    """The commits of a run.

    Args:
        entries: those of its journal, oldest first.
    """

    def __init__(self, entries: Iterable[Mapping[str, Any]] = ()) -> None:
        self._steps: dict[str, int] = {}
        self._unnamed: set[int] = set()
        for entry in entries:
            self.add(entry)

    def add(self, entry: Mapping[str, Any]) -> None:
        """Count one more entry of the journal."""
        event, name, step = entry["event"], entry.get("checkpoint"), entry.get("step")
        moved = entry.get("set_aside")
        if event == "commit" and isinstance(step, int):
            if isinstance(name, str):
                self._steps[name] = step
            else:  # version 0.1.0 did not write the name
                self._unnamed.add(step)
        elif event == "prune" and isinstance(name, str):
            self._steps.pop(name, None)
        elif event == "start" and isinstance(moved, list):
            for each in moved:
                self._steps.pop(str(each), None)
        elif event == "rewind" and isinstance(step, int):
            self._steps = {name: known for name, known in self._steps.items() if known <= step}

    def has(self, name: str) -> bool:
        """Return whether the run committed a checkpoint under this name, and has not removed it."""
        return name in self._steps

    def has_unnamed(self, step: int) -> bool:
        """Return whether the run committed a checkpoint of this step whose name the journal does not say."""
        return step in self._unnamed
