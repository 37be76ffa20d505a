"""How long a run may take: where its end is known from, and how long before it the run must begin to leave."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Literal, NamedTuple

from resume_adapters.errors import UnsupportedSetting

VARIABLE = "RESUME_ADAPTERS_MAX_RUNTIME"

Walltime = str | timedelta | float
"""``"1-12:00:00"`` (days-hours:minutes:seconds), ``"11:50:00"``, ``"50:00"``, seconds, or a timedelta."""

UNMEASURED = 60.0
"""Least reserve, in seconds, until a commit has been measured."""

_MARGIN = 1.5
"""A save that meets a busy file system takes longer than the slowest that was measured."""
_STEPS = 2
"""The flag may be set right after one step began, and the ranks agree one step behind."""
_LEAVING = 10.0
"""Seconds for all that comes after the commit: trackers, threads and the interpreter end."""

_CLOCK = re.compile(r"(?:(?P<days>\d+)-)?(?:(?:(?P<hours>\d+):)?(?P<minutes>\d+):)?(?P<seconds>\d+(?:\.\d+)?)")


def parse_walltime(walltime: Walltime) -> float:
    """Return a time in seconds.

    Raises:
        UnsupportedSetting: it is written otherwise, or is not positive.
    """
    if isinstance(walltime, timedelta):
        found = walltime.total_seconds()
    elif isinstance(walltime, str):
        found = _parse(walltime.strip())
    else:
        found = float(walltime)
    if not found > 0:
        raise UnsupportedSetting(f"a walltime of {walltime!r} is none; expected a positive time")
    return found


def _parse(text: str) -> float:
    written = _CLOCK.fullmatch(text)
    if written is None or (written["days"] and not written["hours"]):
        raise UnsupportedSetting(
            f'{text!r} is no walltime; expected days-hours:minutes:seconds, such as "1-12:00:00", "11:50:00" or "50:00"'
        )
    days, hours, minutes, rest = (float(written[name] or 0) for name in ("days", "hours", "minutes", "seconds"))
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest


class Deadline(NamedTuple):
    """When a run is ended from outside: seconds since 1970, and who says so."""

    at: float
    source: str


def find_deadline(
    walltime: Walltime | None,
    environment: Mapping[str, str],
    *,
    now: float,
    began: float,
    ask: Callable[[str], str | None],
) -> Deadline | None:
    """Return when the run will be ended, by the first that says so.

    In this order: the argument, ``RESUME_ADAPTERS_MAX_RUNTIME``, ``SLURM_JOB_END_TIME``, and Slurm itself of the job
    that this is (before 22.05 it sets no end time).

    Args:
        walltime: the argument of :class:`~resume_adapters.core.stop.policy.StopOn`.
        environment: the process's.
        now: seconds since 1970.
        began: when the process began; a walltime counts from there.
        ask: returns the time that a Slurm job has left, as ``squeue`` writes it.

    Raises:
        UnsupportedSetting: a time is written in a way that is not understood.
    """
    if walltime is not None:
        return Deadline(began + parse_walltime(walltime), "walltime=")
    if limit := environment.get(VARIABLE):
        return Deadline(began + parse_walltime(limit), VARIABLE)
    if (end := environment.get("SLURM_JOB_END_TIME", "")).isdecimal():
        return Deadline(float(end), "SLURM_JOB_END_TIME")
    job = environment.get("SLURM_JOB_ID")
    left = ask(job) if job else None
    if left and _CLOCK.fullmatch(left):  # else the job has no limit, or is not known
        return Deadline(now + _parse(left), "squeue")
    return None


class ShutdownMargin:
    """How long before its end a run must begin to leave, from what its saves and steps have taken so far.

    Args:
        fixed: the seconds that the user wants; ``"auto"`` measures.
    """

    def __init__(self, fixed: Walltime | Literal["auto"]) -> None:
        self._fixed = None if fixed == "auto" else parse_walltime(fixed)
        self._save = 0.0
        self._gap = 0.0
        self._asked: float | None = None

    def asked(self, now: float) -> None:
        """Note that the flag was read; the longest time between two readings is the slowest step."""
        if self._asked is not None and now - self._asked > self._gap:
            self._gap = now - self._asked
        self._asked = now

    def paused(self) -> None:
        """Note that what comes before the next reading is no step: a save."""
        self._asked = None

    def saved(self, took: float) -> None:
        """Note the seconds from the beginning of a save until it was committed."""
        self._save = max(self._save, took)

    @property
    def seconds(self) -> float:
        """The reserve."""
        if self._fixed is not None:
            return self._fixed
        measured = _MARGIN * self._save + _STEPS * self._gap + _LEAVING
        return measured if self._save else max(UNMEASURED, measured)
