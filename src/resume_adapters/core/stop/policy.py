"""What asks a run to stop."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal

from resume_adapters.core.stop.walltime import Walltime, parse_walltime
from resume_adapters.errors import UnsupportedSetting

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)

WALLTIME = "the walltime is nearly over"

_WARNINGS = ("SIGUSR1", "SIGUSR2", WALLTIME)


@dataclass(frozen=True)
class StopOn:
    """What asks a run to stop: save, then leave.

    Args:
        signals: which signals ask for it. Previous handlers are put back when training ends.
        exit_code: exit status of a stopped run; 0 tells most schedulers that nothing is wrong. A supervisor that
            resubmits on a certain code wants that code here.
        walltime: how long the process may take, from its beginning: ``"11:50:00"``, a timedelta or seconds. By default
            what ``RESUME_ADAPTERS_MAX_RUNTIME``, ``SLURM_JOB_END_TIME`` or Slurm itself says, in this order.
        reserve: how long before its end the run begins to leave, written in the same way. ``"auto"`` measures: from the
            slowest save and the slowest step of this run so far, with a margin, and at least a minute until a save has
            been measured.
        requeue: ``"slurm"`` asks Slurm to queue the job again after a stop that was a warning: the walltime, SIGUSR1 or
            SIGUSR2. After SIGTERM, SIGINT or ``resume-adapters stop`` the job is left to whoever ended it.

    Raises:
        UnsupportedSetting: a time is written in a way that is not understood, or ``requeue`` names no scheduler.
    """

    signals: tuple[signal.Signals, ...] = SIGNALS
    exit_code: int = 0
    walltime: Walltime | None = None
    reserve: Walltime | Literal["auto"] = "auto"
    requeue: Literal["slurm"] | None = None

    def __post_init__(self) -> None:
        if self.walltime is not None:
            parse_walltime(self.walltime)
        if self.reserve != "auto":
            parse_walltime(self.reserve)
        if self.requeue not in (None, "slurm"):
            raise UnsupportedSetting(f'requeue={self.requeue!r} names no scheduler; expected "slurm", or None')


def is_warning(reason: str) -> bool:
    """Return whether a reason to stop says that the job's time is nearly over, rather than that it was ended."""
    return reason in _WARNINGS
