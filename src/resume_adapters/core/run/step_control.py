"""What happens at the end of each step: go on, save, or stop; decided alike on all ranks.

One start of a run goes through :class:`StepControl` from top to bottom: :meth:`~StepControl.begin` installs the signal
handlers and the monitor, :meth:`~StepControl.end_step` decides, and :meth:`~StepControl.close` undoes ``begin``.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import NamedTuple

from resume_adapters.core.log import logger
from resume_adapters.core.run.context import RunContext
from resume_adapters.core.run.monitor import Monitor
from resume_adapters.core.run_directory.launches import WastedLaunch
from resume_adapters.core.run_directory.status import RunState, RunStatus
from resume_adapters.core.saving.cadence import chosen
from resume_adapters.core.stop.policy import WALLTIME, is_warning
from resume_adapters.core.stop.processes import find_launchers, start_time
from resume_adapters.core.stop.vote import SaveWish, StopVote, common_reason
from resume_adapters.core.stop.walltime import (
    Deadline,
    ShutdownMargin,
    describe_shortage,
    find_deadline,
    slurm_time_left,
)

_LOOK_EVERY = 1.0
"""Seconds between two looks for the stop file while data is skipped."""


class Decision(NamedTuple):
    """What all ranks do at the end of a step. A stop also saves, if this step is not saved yet, and then leaves.

    Attributes:
        save: save to the run directory.
        stop: save there, and leave.
        save_to_memory: save to memory; not beside another save.
    """

    save: bool
    stop: bool
    save_to_memory: bool = False


GO_ON = Decision(save=False, stop=False)
"""Nothing is due, as after most steps."""


class StepControl:
    """One start of a run, from :meth:`begin` to :meth:`close`.

    Args:
        context: what the parts of the run have in common.
        refresh: updates ``status.json``; called once a second by the monitor, on the leader of a run directory.

    Attributes:
        flag: this rank's stop flag.
        deadline: when the run is ended from outside, if that is known.
        duties: further ones of the monitor's, set before :meth:`begin`.
    """

    def __init__(self, context: RunContext, refresh: Callable[[], None]) -> None:
        ranks, cadence = context.ranks, context.options.cadence
        memory = context.options.memory
        memory_cadence = None if memory is None else chosen(memory.save_every, memory.mtbf, to_memory=True)
        self.flag = context.flag
        self._done: tuple[int, float, int | None] = (0, 0.0, None)
        self.deadline: Deadline | None = None
        self.duties: dict[str, Callable[[], None]] = {}
        self._ranks = ranks
        self._control = context.control
        self._cadence = cadence
        self._memory_cadence = memory_cadence
        self._refresh = refresh
        self._messages = context.messages
        self._clock = context.clock
        self._vote = StopVote(ranks, self.flag)
        self._is_alone = memory_cadence is None and not self._vote.is_behind
        self._margin = ShutdownMargin(context.options.stop.reserve)
        self._rate = StepRate()
        self._process_began = 0.0
        self._first_step_ended: float | None = None
        # Ranks have different clocks, so rank zero alone decides about time, and the vote carries its decision.
        self._decides_saves = cadence is not None and cadence.steps is None and ranks.rank == 0
        self._decides_memory = memory_cadence is not None and memory_cadence.steps is None and ranks.rank == 0
        self._voted_save = self._voted_memory = self._just_saved = False
        self._has_launchers: Callable[[], bool] = lambda: True
        self._monitor: Monitor | None = None
        self._looked = 0.0

    # ---- Begin and end

    def begin(self, progress: Progress, *, is_leader: bool) -> None:
        """Install the signal handlers and start the monitor.

        Args:
            progress: steps and epochs completed.
            is_leader: this rank is the leader of its run directory.

        Raises:
            UnsupportedSetting: a walltime in the environment is invalid.
        """
        self._done = progress
        self._process_began = start_time(os.getpid()) or self._clock()
        self.deadline = self._find_deadline()
        journal = self._control.journal
        for entry in journal.history() if self._ranks.rank == 0 else ():
            self._margin.saved(entry.get("seconds", 0.0))
        for cadence in (self._cadence, self._memory_cadence):
            if cadence is not None:
                cadence.start(time.monotonic(), journal.history() if self._ranks.rank == 0 else ())
        self.flag.install()
        if is_leader:
            with contextlib.suppress(OSError):  # the monitor looks again
                self._look_for_stop_file()
        self._has_launchers = find_launchers()
        self._monitor = Monitor(self._duties(is_leader))
        self._monitor.start()

    def close(self) -> None:
        """Restore the signal handlers, end the monitor, and close the channel of the vote."""
        self.flag.uninstall()
        if self._monitor is not None:
            self._monitor.stop()
        self._vote.close()

    def _find_deadline(self) -> Deadline | None:
        first = self._ranks.rank == 0
        found = find_deadline(
            self.flag.on.walltime,
            os.environ,
            now=self._clock(),
            began=self._process_began,
            ask=slurm_time_left if first else lambda job: None,  # the other ranks learn of it by the vote
        )
        if found is not None and first:
            ends = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.at))
            logger.info("Walltime ends at %s (%s); the run saves and exits before.", ends, found.source)
        return found

    # ---- At the end of a step

    @property
    def progress(self) -> Progress:
        """Steps and epochs completed."""
        return Progress(*self._done)

    def end_step(self, step: int, epoch: float, horizon: int | None = None) -> Decision:
        """End an optimizer step, and return what all ranks do now: save, stop, or go on.

        Every rank calls it at the end of every step. A stop, and a save that is due by the clock, take effect one step
        later, so that no rank waits for the network.

        Args:
            epoch: epochs completed, with the fraction of the current one.
            horizon: number of steps after which the run is finished, if known.
        """
        now = time.monotonic()
        self._done = (step, epoch, horizon)
        if self._first_step_ended is None:
            self._first_step_ended = self._clock()
            self._margin.stepped()
        self._margin.polled(now)
        is_due = self._cadence is not None and self._cadence.is_due(step, now)
        if self._is_alone and not (is_due or self.flag.reason):
            self._just_saved = False
            return GO_ON  # a vote would say no more, and take longer
        votes_save = is_due and self._decides_saves and not self._voted_save
        self._voted_save = self._voted_save or votes_save
        wish = SaveWish.TO_DISK if votes_save else self._wish_for_memory(step, now)
        if stop := self._vote.poll(save=wish):
            self._announce_stop()
        # All ranks know of a save between a vote and its result; the vote for a save is then void.
        is_void = self._vote.is_behind and self._just_saved
        voted = self._vote.take_save()
        agreed = SaveWish.NOTHING if is_void else voted
        self._just_saved = False
        by_steps = self._cadence is not None and self._cadence.steps is not None
        save = agreed is SaveWish.TO_DISK or (is_due and by_steps)
        to_memory = agreed is SaveWish.TO_MEMORY or self._is_due_in_memory(step, now)
        return Decision(save, stop, to_memory and not (save or stop))

    def _wish_for_memory(self, step: int, now: float) -> SaveWish:
        cadence = self._memory_cadence
        if cadence is None or not self._decides_memory or self._voted_memory or not cadence.is_due(step, now):
            return SaveWish.NOTHING
        self._voted_memory = True
        return SaveWish.TO_MEMORY

    def _is_due_in_memory(self, step: int, now: float) -> bool:
        cadence = self._memory_cadence
        return cadence is not None and cadence.steps is not None and cadence.is_due(step, now)

    def should_stop(self) -> bool:
        """Return whether all ranks save and leave now. Every rank calls it at the same places.

        For places within a step: between the batches of an evaluation.
        """
        self._margin.polled(time.monotonic())
        if stop := self._vote.poll("between steps"):
            self._announce_stop()
        return stop

    def agree_now(self) -> bool:
        """Return whether any rank stops, waiting for all of them to answer. Every rank calls it."""
        return self._vote.agree_now()

    def agree_on_reason(self, wasted: Sequence[WastedLaunch], *, has_progressed: bool) -> str:
        """Return why all ranks leave. Every rank calls it.

        The second launch in a row that leaves for the walltime without progress halts the run. All ranks do the same:
        the arguments and the reason are alike on all.

        Args:
            wasted: the launches before this one that kept no step, oldest first.
            has_progressed: this launch has kept one.

        Returns:
            The reason, with the figures of rank zero where it halts.
        """
        self.agree_now()
        reason = common_reason(self._ranks, self.flag)
        before = list(takewhile(lambda launch: launch.left_for_walltime, reversed(wasted)))
        if not before or has_progressed or not is_warning(reason):
            return reason
        launches = f"{len(before) + 1} launches in a row left for the walltime before they kept a step"
        self.flag.halt(f"{launches}: {self._describe_shortage()}")
        return common_reason(self._ranks, self.flag)

    def _describe_shortage(self) -> str:
        deadline, stepped = self.deadline, self._first_step_ended
        began = deadline.began if deadline else self._process_began
        return describe_shortage(
            deadline.at - began if deadline else None,
            (self._clock() if stepped is None else stepped) - began,
            self._margin.reserve,
            has_stepped=stepped is not None,
        )

    def is_asked_alone(self) -> bool:
        """Return whether this rank was asked to stop, without a vote. Looks for the stop file once a second."""
        now = time.monotonic()
        if now - self._looked >= _LOOK_EVERY:
            self._looked = now
            with contextlib.suppress(OSError):  # tried again a second later
                self._look_for_stop_file()
        return self.flag.reason is not None

    def saved(self, began: float) -> None:
        """Count a save that is written but not yet committed.

        Args:
            began: since when the training has waited for it, by ``time.monotonic``.
        """
        now = time.monotonic()
        self._margin.paused()
        self._voted_save, self._just_saved = False, True
        self._voted_memory = False
        if self._cadence is not None:
            self._cadence.saved(now, now - began)
        if self._memory_cadence is not None:
            self._memory_cadence.postpone(now)

    def saved_to_memory(self, began: float, *, is_written: bool) -> None:
        """Count a save to memory; see :meth:`saved`. Where it failed, or was left out, its cost is not counted."""
        now = time.monotonic()
        self._margin.paused()
        self._voted_memory = False
        cadence = self._memory_cadence
        assert cadence is not None, "a save to memory was due"
        if is_written:
            cadence.saved(now, now - began)
        else:
            cadence.postpone(now)

    def save_failed(self) -> None:
        """Count a save that failed: the next one is due an interval later."""
        self._margin.paused()
        self._voted_save, self._just_saved = False, True
        if self._cadence is not None:
            self._cadence.postpone(time.monotonic())

    def committed(self, seconds: float) -> None:
        """Count a commit, from the seconds since its save began; called on the thread that commits."""
        self._margin.saved(seconds)

    def status(self, state: RunState) -> RunStatus:
        """Return the status of a run that is in this state."""
        step, epoch, horizon = self.progress
        if state is not RunState.RUNNING:
            return RunStatus(state=state, step=step, epoch=epoch, horizon=horizon)
        rate, cadence = self._rate.rate, self._cadence
        return RunStatus(
            state=state,
            step=step,
            epoch=epoch,
            horizon=horizon,
            rate=rate,
            eta=self._clock() + max(0, horizon - step) / rate if rate and horizon is not None else None,
            next_save=cadence.next_save(step, time.monotonic(), rate) if cadence is not None else None,
            ends=self.deadline.at if self.deadline else None,
        )

    # ---- Once a second, on the thread of the monitor

    def _duties(self, is_leader: bool) -> dict[str, Callable[[], None]]:
        of_all = {
            "look for the launcher": self._look_for_launchers,
            "look at the walltime": self._look_at_deadline,
            "announce a stop": self._announce_stop,
            **self.duties,
        }
        if not is_leader:
            return of_all
        return {
            **of_all,
            "look for the stop file": self._look_for_stop_file,
            "measure the rate": lambda: self._rate.add(time.monotonic(), self.progress.step),
            "refresh the status": self._refresh_status,
        }

    def _announce_stop(self) -> None:
        if self.flag.reason is not None:
            self._messages.stopping(self.flag.reason)

    def _look_for_launchers(self) -> None:
        if not self._has_launchers():
            self.flag.request("the launcher of this process is gone")

    def _look_at_deadline(self) -> None:
        if self.deadline is not None and self._clock() >= self.deadline.at - self._margin.seconds:
            self.flag.request(WALLTIME)

    def _look_for_stop_file(self) -> None:
        if (reason := self._control.stop_file.reason()) is not None:
            self.flag.request(reason)

    def _refresh_status(self) -> None:
        if (later := self._control.fencing.later_start()) is not None:
            self.flag.request(f"{later} took the run directory over")
        else:
            self._refresh()


_WINDOW = 60
"""Seconds over which the rate is taken."""


class Progress(NamedTuple):
    """Optimizer steps and epochs completed, and the number of steps after which the run is finished, if known."""

    step: int
    epoch: float
    horizon: int | None = None


class StepRate:
    """Optimizer steps a second over the last minute, pauses included."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque(maxlen=_WINDOW)

    def add(self, now: float, step: int) -> None:
        """Add the step reached at a time; about once a second."""
        self._seen.append((now, step))

    @property
    def rate(self) -> float | None:
        """Optimizer steps a second; ``None`` until it is known."""
        if len(self._seen) < 2:
            return None
        (first, from_step), (last, to_step) = self._seen[0], self._seen[-1]
        return (to_step - from_step) / (last - first) if last > first else None
