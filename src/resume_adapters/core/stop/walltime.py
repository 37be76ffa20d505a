"""When the scheduler will end a run, and how long before that the run must begin to save and exit."""

from __future__ import annotations

import math
import os
import re
import subprocess
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Literal, NamedTuple

from resume_adapters.core.log import logger
from resume_adapters.errors import UnsupportedSetting

VARIABLE = "RESUME_ADAPTERS_MAX_RUNTIME"

Walltime = str | timedelta | float
"""``"1-12:00:00"`` (days-hours:minutes:seconds), ``"11:50:00"``, ``"50:00"``, seconds, or a timedelta."""

UNMEASURED = 60.0
"""Least margin in seconds until a commit has been measured."""

_MARGIN = 1.5
"""On a busy file system, a save may take longer than the slowest one so far."""
_STEPS = 2
"""The flag may be set right after a step began, and the ranks agree one step later."""
_LEAVING = 10.0
"""Seconds for what follows the commit: trackers, threads and the interpreter end."""

_CLOCK = re.compile(r"(?:(?P<days>\d+)-)?(?:(?:(?P<hours>\d+):)?(?P<minutes>\d+):)?(?P<seconds>\d+(?:\.\d+)?)")


def parse_walltime(walltime: Walltime) -> float:
    """Return a walltime in seconds.

    Raises:
        UnsupportedSetting: it is not a duration, or not positive.
    """
    if isinstance(walltime, timedelta):
        found = walltime.total_seconds()
    elif isinstance(walltime, str):
        found = _parse(walltime.strip())
    else:
        found = float(walltime)
    if not found > 0:
        raise UnsupportedSetting(f"invalid walltime {walltime!r}: expected a positive duration")
    return found


def _parse(text: str) -> float:
    written = _CLOCK.fullmatch(text)
    if written is None or (written["days"] and not written["hours"]):
        raise UnsupportedSetting(
            f"invalid walltime {text!r}: expected days-hours:minutes:seconds, such as "
            '"1-12:00:00", "11:50:00" or "50:00"'
        )
    days, hours, minutes, rest = (float(written[name] or 0) for name in ("days", "hours", "minutes", "seconds"))
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest


class Deadline(NamedTuple):
    """When a run is ended from outside, the source of that, and when its time began; in seconds since 1970."""

    at: float
    source: str
    began: float


def find_deadline(
    walltime: Walltime | None,
    environment: Mapping[str, str],
    *,
    now: float,
    began: float,
    ask: Callable[[str], str | None],
) -> Deadline | None:
    """Return when the run will be ended, from the first source that knows.

    The sources are the argument, ``RESUME_ADAPTERS_MAX_RUNTIME``, ``SLURM_JOB_END_TIME``, and ``squeue`` (Slurm before
    22.05 sets no end time), in this order.

    Args:
        walltime: the argument of :class:`~resume_adapters.core.stop.policy.StopOn`.
        environment: the environment variables.
        now: seconds since 1970.
        began: when the process began; a walltime counts from there.
        ask: returns the time that a Slurm job has left, in the format of ``squeue``.

    Raises:
        UnsupportedSetting: a walltime is invalid.
    """
    if walltime is not None:
        return Deadline(began + parse_walltime(walltime), "walltime=", began)
    if limit := environment.get(VARIABLE):
        return Deadline(began + parse_walltime(limit), VARIABLE, began)
    if (end := environment.get("SLURM_JOB_END_TIME", "")).isdecimal():
        start = environment.get("SLURM_JOB_START_TIME", "")
        return Deadline(float(end), "SLURM_JOB_END_TIME", float(start) if start.isdecimal() else began)
    job = environment.get("SLURM_JOB_ID")
    left = ask(job) if job else None
    if left and _CLOCK.fullmatch(left):  # otherwise the job is unknown or has no limit
        return Deadline(now + _parse(left), "squeue", began)
    return None


def describe_shortage(limit: float | None, startup: float, reserve: float, *, has_stepped: bool) -> str:
    """Describe how the time of a launch was spent that had to leave before it could keep a step.

    Args:
        limit: the time limit in seconds, if it is known.
        startup: seconds from the beginning of its time to the end of its first step, or to now.
        reserve: seconds before the end of the walltime at which a run leaves.
        has_stepped: the first step has ended.
    """
    spent = f"start-up {'' if has_stepped else 'more than '}{startup:.0f} s, reserve {reserve:.0f} s"
    known = "" if limit is None else f"time limit {limit:.0f} s, "
    minutes = math.floor((startup + reserve) / 60) + 1
    return f"{known}{spent}: ask for at least {minutes} minute{'s' if minutes > 1 else ''}"


class ShutdownMargin:
    """How long before the walltime ends a run must begin to save, from its slowest save and step so far.

    A launch that leaves before it has done a step wastes its start-up, and the next one does the same. So until the
    first step has ended, it leaves only if the time left is less than a step and a save were measured to take.

    Args:
        margin: the margin that the user set; ``"auto"`` measures.
    """

    def __init__(self, margin: Walltime | Literal["auto"]) -> None:
        self._fixed = None if margin == "auto" else parse_walltime(margin)
        self._save = 0.0
        self._gap = 0.0
        self._polled = math.inf
        self._has_stepped = False

    def polled(self, now: float) -> None:
        """Count a poll of the stop flag; the longest time between two polls is the slowest step."""
        gap, self._polled = now - self._polled, now
        if gap > self._gap:
            self._gap = gap

    def stepped(self) -> None:
        """Count a step of this launch: a stop now saves something, so the whole reserve holds."""
        self._has_stepped = True

    def paused(self) -> None:
        """Do not count the time until the next poll as a step: it includes a save."""
        self._polled = math.inf

    def saved(self, seconds: float) -> None:
        """Count a commit, from the seconds since its save began."""
        self._save = max(self._save, seconds)

    @property
    def seconds(self) -> float:
        """The margin that holds now."""
        return self.reserve if self._has_stepped else min(self.reserve, self._save + self._gap)

    @property
    def reserve(self) -> float:
        """The margin that holds once this launch has done a step."""
        if self._fixed is not None:
            return self._fixed
        measured = _MARGIN * self._save + _STEPS * self._gap + _LEAVING
        return measured if self._save else max(UNMEASURED, measured)


_PATIENCE = 20.0
"""Seconds to wait for a busy controller."""


def slurm_job(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the id of the Slurm job of this process; ``None`` outside Slurm."""
    return environment.get("SLURM_JOB_ID")


def slurm_time_left(number: str) -> str | None:
    """Return the time that a job has left, as ``squeue`` prints it: ``1-02:03:04`` or ``UNLIMITED``, for example."""
    return _ask("squeue", "-h", "-j", number, "-o", "%L")


def slurm_requeue(number: str) -> bool:
    """Ask Slurm to requeue a running job, which ends it; return whether Slurm accepted."""
    return _ask("scontrol", "requeue", number) is not None


def _ask(*command: str) -> str | None:
    """Return the output of a Slurm command; ``None`` if it fails, with a warning."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=True)
    except subprocess.CalledProcessError as error:
        problem = (error.stderr or error.stdout).strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    else:
        return done.stdout.strip()
    logger.warning("%s failed: %s", " ".join(command), problem)
    return None
