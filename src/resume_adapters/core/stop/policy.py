"""What asks a run to stop."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal

from resume_adapters.core.choices import Requeue
from resume_adapters.core.stop.walltime import Walltime, parse_walltime
from resume_adapters.errors import UnsupportedSetting

_NAMES = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")

SIGNALS: tuple[signal.Signals, ...] = tuple(signal.Signals[name] for name in _NAMES if hasattr(signal, name))
"""The signals that ask a run to stop; Windows lacks two of them."""

WALLTIME = "the walltime is nearly over"

_WARNINGS = ("SIGUSR1", "SIGUSR2", WALLTIME)


@dataclass(frozen=True)
class StopOn:
    """What asks a run to stop: save, then leave.

    Args:
        signals: the signals that ask for it. The previous handlers are restored when training ends.
        exit_code: exit status of a stopped run; 0 means success to most schedulers. Set the code on which your
            supervisor resubmits the job.
        walltime: how long the process may run, from its start: ``"11:50:00"``, a timedelta or seconds. By default
            taken from ``RESUME_ADAPTERS_MAX_RUNTIME``, ``SLURM_JOB_END_TIME`` or ``squeue``, in this order.
        reserve: how long before the walltime ends the run begins to save and exit, in the same formats. ``"auto"``
            takes it from the slowest save and the slowest step of this run so far, with a margin, and at least a minute
            until a save has been measured. Until a launch has done a step, it leaves only if the time left is less than
            the slowest save took.
        requeue: ``"slurm"`` asks Slurm to requeue the job after a stop for the walltime, SIGUSR1 or SIGUSR2. After
            SIGTERM, SIGINT or ``resume-adapters stop``, whatever ended the job decides.

    Raises:
        UnsupportedSetting: a duration is invalid, or ``requeue`` is not a known scheduler.
    """

    signals: tuple[signal.Signals, ...] = SIGNALS
    exit_code: int = 0
    walltime: Walltime | None = None
    reserve: Walltime | Literal["auto"] = "auto"
    requeue: Requeue | None = None

    def __post_init__(self) -> None:
        if self.walltime is not None:
            parse_walltime(self.walltime)
        if self.reserve != "auto":
            parse_walltime(self.reserve)
        if self.requeue not in (None, "slurm"):
            raise UnsupportedSetting(f'invalid requeue={self.requeue!r}: expected "slurm" or None')


def is_warning(reason: str) -> bool:
    """Return whether a reason to stop warns that the job's time is nearly over."""
    return reason in _WARNINGS
