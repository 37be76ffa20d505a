"""Why and when to stop: signals set a flag, and the ranks agree on it at step boundaries.

A handler only sets the flag. Nobody acts on it alone: the flags of all ranks are joined by an asynchronous all-reduce
that is started at one step boundary and read at the next, so every rank learns of a stop at the same step and nobody
waits for the network.
"""

from __future__ import annotations

import signal
import sys
import threading
from dataclasses import dataclass
from types import FrameType
from typing import Any

from resume_adapters.core.ranks import Ranks

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class StopOn:
    """What asks a run to stop: save, then leave.

    Args:
        signals: which signals ask for it. Previous handlers are put back when training ends.
        exit_code: exit status of a stopped run; 0 tells most schedulers that nothing is wrong. A supervisor that
            resubmits on a certain code wants that code here.
    """

    signals: tuple[signal.Signals, ...] = SIGNALS
    exit_code: int = 0


class StopFlag:
    """The flag of one process, and the handlers that set it."""

    def __init__(self, on: StopOn) -> None:
        self.on = on
        self.reason: str | None = None
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

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self._interrupted:
                raise KeyboardInterrupt("second SIGINT: leaving at once, without saving")
            self._interrupted = True
        self.request(signal.Signals(number).name)


class Agreement:
    """Joins the flags of all ranks, one step behind.

    Args:
        ranks: the ranks of the run.
        flag: this rank's flag.
    """

    def __init__(self, ranks: Ranks, flag: StopFlag) -> None:
        self.flag = flag
        self._group = getattr(ranks.twin(), "group", None)
        self._agreed = False
        self._votes: Any = None
        self._work: Any = None

    def reached(self) -> bool:
        """Return whether all ranks are to stop now. Every rank must ask at the same step boundaries."""
        if self._group is None:
            return self.flag.reason is not None
        self._agreed = self._agreed or self._collect()
        if not self._agreed:
            self._vote()
        elif self.flag.reason is None:
            self.flag.request("another rank was asked to stop")
        return self._agreed

    def close(self) -> None:
        """Take in the vote that is under way, so that no rank leaves while another waits for it."""
        self._collect()

    def _vote(self) -> None:
        import torch
        import torch.distributed as dist

        self._votes = torch.tensor([self.flag.reason is not None], dtype=torch.int32)
        self._work = dist.all_reduce(self._votes, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

    def _collect(self) -> bool:
        if self._work is None:
            return False
        self._work.wait()
        self._work = None
        return bool(self._votes.item())
