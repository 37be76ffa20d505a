"""The points of a run at which it stops itself, so that a drill can kill, signal or continue it there."""

from __future__ import annotations

import re
from dataclasses import dataclass

from resume_adapters.errors import UnsupportedSetting

PAUSE = "RESUME_ADAPTERS_PAUSE"
"""The environment variable that holds the points, separated by blanks."""

_POINT = re.compile(r"(?:step:(?P<step>\d+)|(?P<work>save|prune):(?P<of>\d+):(?P<number>[1-9]\d*))(?:@(?P<rank>\d+))?")


@dataclass(frozen=True)
class PausePoint:
    """A point at which a process stops itself, once in a launch.

    Attributes:
        text: the point as it was given.
        work: ``"step"`` (after the line of a step), ``"save"`` or ``"prune"`` (within the work).
        step: the first step to which it applies; the point is reached at that step or at the next one after it.
        operation: the file operation of the work, from 1, before which the process stops; 0 for a step.
    """

    text: str
    work: str
    step: int
    operation: int


def points_of_rank(given: str, rank: int) -> list[PausePoint]:
    """Return the points of one rank. Without ``@RANK``, a step applies to all ranks, a save or prune to rank zero.

    Args:
        given: the points, separated by blanks.

    Raises:
        UnsupportedSetting: one of them is not a point.
    """
    found = []
    for text in given.split():
        match = _POINT.fullmatch(text)
        if match is None:
            raise UnsupportedSetting(
                f"{PAUSE} holds {text!r}; expected step:N, save:N:K or prune:N:K, each with @RANK or without"
            )
        work = match["work"] or "step"
        wanted = match["rank"] or (None if work == "step" else "0")
        if wanted is None or int(wanted) == rank:
            found.append(PausePoint(text, work, int(match["step"] or match["of"]), int(match["number"] or 0)))
    return found
