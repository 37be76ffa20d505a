"""Why and when to stop: signals and others set a flag, and the ranks agree on it at step boundaries.

A handler only sets the flag. Nobody acts on it alone: the flags of all ranks are joined by an asynchronous all-reduce
that is started at one step boundary and read at the next, so every rank learns of a stop at the same step and nobody
waits for the network. Rank zero's word that a save is due travels with it.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal

from resume_adapters.core import walltime as walltimes
from resume_adapters.core.ranks import Ranks
from resume_adapters.core.walltime import Walltime
from resume_adapters.errors import UnsupportedSetting

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)

WALLTIME = "the walltime is nearly over"
_WARNINGS = ("SIGUSR1", "SIGUSR2", WALLTIME)

_RHYTHM = 0.05
"""Seconds between two votes, where steps are shorter: a vote takes a few hundred microseconds of the training."""
_LONGEST_STRIDE = 8
"""Steps may become longer at any time; how late a stop is heard must not depend on how short they were."""

_NOTHING, _STOP, _HALT = 0, 1, 2
_ELSEWHERE = "another rank was asked to stop"


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
            walltimes.seconds(self.walltime)
        if self.reserve != "auto":
            walltimes.seconds(self.reserve)
        if self.requeue not in (None, "slurm"):
            raise UnsupportedSetting(f'requeue={self.requeue!r} names no scheduler; expected "slurm", or None')


class StopFlag:
    """The flag of one process, and the handlers that set it.

    Attributes:
        reason: why to stop; ``None`` as long as nothing asked for it.
        halted: a human must look at the run before it goes on.
    """

    def __init__(self, on: StopOn) -> None:
        self.on = on
        self.reason: str | None = None
        self.halted = False
        self._interrupted = False
        self._previous: dict[signal.Signals, Any] = {}

    def install(self) -> None:
        """Take the signals over. In an interactive interpreter SIGINT is left alone; off the main thread, all are."""
        if threading.current_thread() is not threading.main_thread():
            return
        interactive = hasattr(sys, "ps1") or sys.flags.interactive
        for number in self.on.signals:
            if number not in self._previous and not (number is signal.SIGINT and interactive):
                self._previous[number] = signal.signal(number, self._handle)

    def uninstall(self) -> None:
        """Put the previous handlers back."""
        while self._previous:
            number, handler = self._previous.popitem()
            # A handler that was not installed from python cannot be put back from python.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def request(self, reason: str) -> None:
        """Ask for a stop; the first reason stays."""
        if self.reason is None:
            self.reason = reason

    def halt(self, reason: str) -> None:
        """Ask for a stop that a human must look at; its reason counts for more than that of a plain stop."""
        if not self.halted:
            self.reason, self.halted = reason, True

    @property
    def level(self) -> int:
        """What this process asks for, as a vote: the highest of all ranks is what they do."""
        return _HALT if self.halted else _NOTHING if self.reason is None else _STOP

    def heed(self, level: int) -> None:
        """Take over what the ranks agreed on."""
        if level == _HALT and not self.halted:
            self.halt(_ELSEWHERE)
        elif level == _STOP:
            self.request(_ELSEWHERE)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self._interrupted:
                raise KeyboardInterrupt("second SIGINT: leaving at once, without saving")
            self._interrupted = True
        self.request(signal.Signals(number).name)


def common_reason(ranks: Ranks, flag: StopFlag) -> str:
    """Return why the ranks stop: the reason of the first that was asked itself. Every rank must ask."""
    reasons = ranks.gather((flag.level, flag.reason))
    own = [reason for level, reason in reasons if reason != _ELSEWHERE and level == flag.level]
    return own[0] if own and own[0] else "a stop was requested"


def is_warning(reason: str) -> bool:
    """Return whether a reason to stop says that the job's time is nearly over, rather than that it was ended."""
    return reason in _WARNINGS


class Agreement:
    """Joins the flags of all ranks, one step behind.

    Where steps are short the ranks vote only after several of them, and agree in each vote on how many that are.

    Args:
        ranks: the ranks of the run.
        flag: this rank's flag.
    """

    def __init__(self, ranks: Ranks, flag: StopFlag) -> None:
        self.flag = flag
        self._ranks = ranks.twin()
        self._group = getattr(self._ranks, "group", None)
        self._level = _NOTHING
        self._save = False
        self._due = False
        self._votes: Any = None
        self._work: Any = None
        self._place = ""
        self._asked, self._stride, self._voted = 0, 1, 0.0

    @property
    def is_behind(self) -> bool:
        """Whether what one asks for is heard at the next asking only."""
        return self._group is not None

    def reached(self, place: str = "step", *, save: bool = False) -> bool:
        """Return whether all ranks are to stop now. Every rank must ask at the same places.

        Args:
            place: in what kind of loop it is asked; one is quicker than another.
            save: this rank says that a save is due.
        """
        if self._group is None:
            self._save = self._save or save
            return self.flag.reason is not None
        self._collect()
        if place != self._place:
            self._place, self._asked, self._stride, self._voted = place, 0, 1, 0.0
        self._asked += 1
        self._due = self._due or save
        if not self._level and self._asked >= self._stride:
            self._vote()
        return bool(self._level)

    def take_save(self) -> bool:
        """Return whether a rank has said that a save is due, once: all ranks are told at the same place."""
        save, self._save = self._save, False
        return save

    def settle(self) -> bool:
        """Return whether any rank is to stop, and wait for all of them to say so. Every rank must ask."""
        self._collect()
        self._heed(max(self._ranks.gather(self.flag.level)))
        return self.flag.reason is not None

    def close(self) -> None:
        """Take in the vote that is under way, so that no rank leaves while another waits for it."""
        self._collect()

    def _vote(self) -> None:
        import torch
        import torch.distributed as dist

        now = time.monotonic()
        stride = int(min(_RHYTHM * self._asked / max(now - self._voted, 1e-9), _LONGEST_STRIDE))
        self._votes = torch.tensor([self.flag.level, self._due, stride], dtype=torch.int32)
        self._asked, self._voted, self._due = 0, now, False
        self._work = dist.all_reduce(self._votes, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

    def _collect(self) -> None:
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        level, save, stride = self._votes.tolist()
        self._stride = max(1, stride)
        self._save = self._save or bool(save)
        self._heed(level)

    def _heed(self, level: int) -> None:
        self._level = max(self._level, level)
        self.flag.heed(self._level)
