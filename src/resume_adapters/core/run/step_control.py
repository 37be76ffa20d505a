"""How a start of a run goes on from its first step to its last: its pace, when it saves, what asks it to stop."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import NamedTuple

from resume_adapters.core.log import logger
from resume_adapters.core.ranks import Ranks
from resume_adapters.core.run.monitor import Monitor
from resume_adapters.core.run.progress import Progress, StepRate
from resume_adapters.core.run_directory.control import ControlDirectory
from resume_adapters.core.run_directory.status import RunStatus
from resume_adapters.core.saving.cadence import Cadence
from resume_adapters.core.stop import slurm
from resume_adapters.core.stop.policy import WALLTIME, StopOn
from resume_adapters.core.stop.processes import find_launchers, start_time
from resume_adapters.core.stop.signals import StopFlag
from resume_adapters.core.stop.vote import StopVote
from resume_adapters.core.stop.walltime import Deadline, ShutdownMargin, find_deadline


class Decision(NamedTuple):
    """What all ranks do at a step boundary. A stop saves too, where this step is not saved yet, and then leaves."""

    save: bool
    stop: bool


class StepControl:
    """One start of a run, from :meth:`begin` to :meth:`end`.

    Args:
        ranks: the ranks of the run.
        control: the ``.resume`` directory.
        on: what asks the run to stop.
        cadence: when it saves, where the framework does not decide that.
        refresh: brings ``status.json`` up to date; called once a second where the directory is led, from a thread.
        clock: returns seconds since 1970.

    Attributes:
        flag: this rank's flag.
        progress: how far the run is.
        deadline: when the run is ended from outside, where that is known.
    """

    def __init__(
        self,
        ranks: Ranks,
        control: ControlDirectory,
        on: StopOn,
        cadence: Cadence | None,
        refresh: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self.flag = StopFlag(on)
        self.progress = Progress(0, 0.0)
        self.deadline: Deadline | None = None
        self._ranks = ranks
        self._control = control
        self._cadence = cadence
        self._refresh = refresh
        self._clock = clock
        self._agreement = StopVote(ranks, self.flag)
        self._reserve = ShutdownMargin(on.reserve)
        self._pace = StepRate()
        self._votes_save = cadence is not None and cadence.steps is None and ranks.rank == 0
        self._voted = self._just_saved = False
        self._has_launchers: Callable[[], bool] = lambda: True
        self._heartbeat: Monitor | None = None
        self._looked = 0.0

    # ---- From the beginning to the end

    def begin(self, progress: Progress, *, leads: bool) -> None:
        """Take the signals over, and begin to look once a second.

        Args:
            progress: how far the run is.
            leads: this rank leads its run directory.

        Raises:
            UnsupportedSetting: a walltime in the environment is written in a way that is not understood.
        """
        self.progress = progress
        self.deadline = self._find_deadline()
        history = self._control.journal.history() if self._ranks.rank == 0 else []
        for entry in history:
            self._reserve.saved(entry.get("seconds", 0.0))
        if self._cadence is not None:
            self._cadence.start(time.monotonic(), history)
        self.flag.install()
        self._has_launchers = find_launchers()
        of_all = [self._look_at_launchers, self._look_at_deadline]
        self._heartbeat = Monitor([*of_all, self._look_after_directory] if leads else of_all)
        self._heartbeat.start()

    def end(self) -> None:
        """Give the signals back, and end what :meth:`begin` began."""
        self.flag.uninstall()
        if self._heartbeat is not None:
            self._heartbeat.stop()
        self._agreement.close()

    def _find_deadline(self) -> Deadline | None:
        first, now = self._ranks.rank == 0, self._clock()
        found = find_deadline(
            self.flag.on.walltime,
            os.environ,
            now=now,
            began=start_time(os.getpid()) or now,
            ask=slurm.time_left if first else lambda job: None,  # the others learn of it from rank zero
        )
        if found is not None and first:
            moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.at))
            logger.info("This process is ended at %s (%s): it will save and leave in time.", moment, found.source)
        return found

    # ---- At step boundaries

    def end_step(self, progress: Progress) -> Decision:
        """Note that a step was completed, and return what all ranks do now; see :meth:`ResumableRun.end_step`."""
        now = time.monotonic()
        self.progress = progress
        self._reserve.asked(now)
        cadence = self._cadence
        due = cadence is not None and cadence.steps is not None and cadence.is_due(progress.step, now)
        vote = self._votes_save and not self._voted and cadence is not None and cadence.is_due(progress.step, now)
        self._voted = self._voted or vote
        stop = self._agreement.reached(save=vote)
        # Where a save came between the vote and its result, all ranks know, and none is due any more.
        overtaken = self._agreement.is_behind and self._just_saved
        due = (self._agreement.take_save() and not overtaken) or due
        self._just_saved = False
        return Decision(due, stop)

    def should_stop(self) -> bool:
        """Return whether all ranks are to stop; see :meth:`ResumableRun.should_stop`."""
        self._reserve.asked(time.monotonic())
        return self._agreement.reached("between steps")

    def settle(self) -> bool:
        """Return whether all ranks are to stop, and wait for each other; every rank asks."""
        return self._agreement.settle()

    def is_asked_alone(self) -> bool:
        """Return whether this rank was asked to stop, here or by a file; once a second it looks for the file."""
        now = time.monotonic()
        if now - self._looked >= 1.0:
            self._looked = now
            self._look_for_file()
        return self.flag.reason is not None

    def saved(self, began: float) -> float:
        """Note a save; return the seconds for which it kept the training waiting.

        Args:
            began: when it began, by ``time.monotonic``.
        """
        now = time.monotonic()
        self._reserve.paused()
        self._voted, self._just_saved = False, True
        if self._cadence is not None:
            self._cadence.saved(now, now - began)
        return now - began

    def committed(self, took: float) -> None:
        """Note the seconds from the beginning of a save until it was committed."""
        self._reserve.saved(took)

    # ---- Once a second, on the thread of the heartbeat

    def _look_at_launchers(self) -> None:
        if not self._has_launchers():
            self.flag.request("the launcher of this process is gone")

    def _look_at_deadline(self) -> None:
        if self.deadline is not None and self._clock() >= self.deadline.at - self._reserve.seconds:
            self.flag.request(WALLTIME)

    def _look_after_directory(self) -> None:
        self._look_for_file()
        self._pace.note(time.monotonic(), self.progress.step)
        with contextlib.suppress(OSError):  # a file system that fails for good is the next save's to report
            later = self._control.fencing.later_start()
            if later is not None:
                self.flag.request(f"{later} took the run directory over")
            else:
                self._refresh()

    def _look_for_file(self) -> None:
        if (reason := self._control.stop_file.reason()) is not None:
            self.flag.request(reason)

    def status(self, state: str) -> RunStatus:
        """Return the status of a run that is in this state."""
        step, epoch, horizon = self.progress
        status = RunStatus(state=state, step=step, epoch=epoch, horizon=horizon)
        if state == "running":
            rate = self._pace.rate
            status.rate = rate
            status.ends = self.deadline.at if self.deadline else None
            if self._cadence is not None:
                status.next_save = self._cadence.next_save(step, time.monotonic(), rate)
            if rate and horizon is not None:
                status.eta = self._clock() + max(0, horizon - step) / rate
        return status
