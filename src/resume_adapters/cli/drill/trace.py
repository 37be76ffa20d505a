"""What the launches of a run traced: one JSON object a line, in one file for each rank of each launch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resume_adapters.cli.drill.faults import Fault

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
