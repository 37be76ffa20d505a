"""Copies the committed checkpoints of a run to one tier, in the background. It never stops the training by itself.

Each rank has a thread, and the threads agree before each copy which checkpoint it is: the newest one that is due on all
ranks. Older ones that are due are left out: a resume takes the newest. A copy that fails is tried again, at
growing intervals with jitter, until it succeeds or a newer one takes its place.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from resume_adapters.core.checkpoint.retention import Policy
from resume_adapters.core.log import logger
from resume_adapters.core.ranks import Ranks
from resume_adapters.core.run_directory.status import MirrorStatus
from resume_adapters.core.tiers.object_store import hide_secrets
from resume_adapters.core.tiers.options import OnBehind
from resume_adapters.core.tiers.remote import RemoteTier
from resume_adapters.core.tiers.tier import SHORTAGES, Identity, LocalFile, TierCheckpoint
from resume_adapters.errors import CheckpointDamaged, FencedOff

MIRROR_THREAD = "resume-adapters-mirror"
"""The name of the threads."""

_LONGEST_PAUSE = 60.0
"""Seconds between two attempts, at most."""

_DOUBLINGS = 6
"""How often the pause between two attempts grows."""

_LAST_ATTEMPTS = 3
"""How often the last copy of a run is tried."""

_LONGEST_GOODBYE = 2.0
"""Seconds for which the end of a run that has failed waits for the thread."""

_TO_GIVE_UP = 0.5
"""Seconds in which a store can be told to forget the parts of a file that is not copied on."""

_TO_LEAVE = 2.0
"""Seconds that a process needs to leave, after it has waited for its last copy."""

_MARGIN = 1.5
"""By how much a copy may be slower than those before it and still be done in time."""


class Settings(Protocol):
    """What the user has set for a tier."""

    @property
    def every(self) -> int: ...
    @property
    def keep(self) -> Policy | None: ...
    @property
    def on_behind(self) -> OnBehind: ...


@dataclass(frozen=True)
class Job:
    """A committed checkpoint that is to be copied.

    Attributes:
        checkpoint: where it goes.
        files: those that this rank answers for.
        may_be_there: an earlier start may have copied it.
    """

    checkpoint: TierCheckpoint
    files: tuple[LocalFile, ...]
    may_be_there: bool = False

    @property
    def identity(self) -> Identity:
        """Which save it is."""
        return self.checkpoint.identity

    @property
    def bytes(self) -> int:
        """The size of this rank's files."""
        return sum(file.entry.bytes for file in self.files)


@dataclass(frozen=True)
class _Failure:
    """Why a rank could not copy."""

    message: str
    is_gone: bool = False
    is_fenced: bool = False
    is_unexpected: bool = False


class TierMirror:
    """Copies to one tier.

    Args:
        tier: the tier.
        settings: what the user has set for it.
        timeout: seconds after which a copy is late, and for which an end waits for the last one.
        ranks: those that share the run directory, on a channel for the thread, which it closes.
        append: appends an entry to the journal.
        ask_to_stop: asks the run to stop, with the reason.
        clock: returns seconds since 1970.
    """

    def __init__(
        self,
        tier: RemoteTier,
        settings: Settings,
        timeout: float,
        ranks: Ranks,
        append: Callable[..., object],
        ask_to_stop: Callable[[str], object],
        clock: Callable[[], float],
    ) -> None:
        self.tier = tier
        self._settings = settings
        self._timeout = timeout
        self._ranks = ranks
        self._append = append
        self._ask_to_stop = ask_to_stop
        self._clock = clock
        self._changed = threading.Condition()
        self._due: list[Job] = []
        self._copying: Identity | None = None
        self._left_out: Job | None = None
        self._generation = 0
        self._commits = 0
        self._closing_at: float | None = None
        self._is_abandoned = self._was_waited_for = False
        self._attempts = self._attempts_at_close = 0
        self._failing_since: float | None = None
        self._problem = ""
        self._rate: float | None = None
        self._step: int | None = None
        self._fenced_off: FencedOff | None = None
        self._unrecorded: list[tuple[str, dict[str, Any]]] = []
        self._thread = threading.Thread(target=self._work, name=MIRROR_THREAD, daemon=True)

    # ---- From the run's own threads

    def start(self, generation: int) -> None:
        """Start the thread.

        Args:
            generation: of this start.
        """
        self._generation = generation
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Count a commit, and copy it if it is due. Every rank calls it for the same commits in the same order.

        Args:
            job: the checkpoint.
        """
        is_due = job.may_be_there or self._commits % self._settings.every == 0
        self._commits += not job.may_be_there
        self._left_out = None if is_due else job
        if is_due:
            with self._changed:
                self._due.append(job)
                self._changed.notify()

    @property
    def behind(self) -> int:
        """How many checkpoints are due and not on the tier."""
        return len(self._due)

    @property
    def state(self) -> MirrorStatus:
        """What ``status.json`` says of the tier."""
        return MirrorStatus(tier=self.tier.label, step=self._step, behind=self.behind, problem=self._problem)

    @property
    def held(self) -> set[str]:
        """The names of what retention must leave in the run directory: what is being copied, and what is next."""
        with self._changed:
            return {job.checkpoint.name for job in self._due if job.identity == self._copying or job is self._due[-1]}

    def require_owned(self) -> None:
        """Raise what the thread has found.

        Raises:
            FencedOff: a later start has claimed the tier.
        """
        if self._fenced_off is not None:
            raise self._fenced_off

    def ask_to_finish(self, seconds_left: float | None) -> float:
        """Let the newest checkpoint be due now, and the thread end once it is copied; see :func:`finish_all`.

        Only here is it known that a save was the last one: a trainer saves at its last step as at any other.

        Args:
            seconds_left: until the process is ended from outside; a copy that does not fit is not begun.

        Returns:
            When that is given up, by :func:`time.monotonic`.
        """
        with self._changed:
            if self._closing_at is None:
                left = self._timeout if seconds_left is None else min(self._timeout, seconds_left - _TO_LEAVE)
                self._closing_at = time.monotonic() + left
                if self._left_out is not None:
                    self._due.append(self._left_out)
                self._changed.notify()
            return self._closing_at

    def wait_until_finished(self) -> None:
        """Wait for a thread that was asked to finish, and say what it has not copied; the second time do nothing."""
        ends = self.ask_to_finish(0.0)
        if self._was_waited_for:
            return
        self._was_waited_for = True
        self._join(ends)  # a store that hangs keeps nobody
        due = self._due  # the thread may copy it at any moment
        if due and self._fenced_off is None and self._ranks.rank == 0:
            logger.warning(
                "the run ends with its mirror behind: %s lacks %s%s. The run directory has it: resume-adapters push.",
                self.tier.label,
                due[-1].checkpoint.name,
                f" ({self._problem})" if self._problem else ", which would not have been copied in the time left",
            )

    @property
    def is_alone(self) -> bool:
        """Whether no other rank copies with this one."""
        return self._ranks.world_size == 1

    def abandon(self) -> None:
        """Let the thread end where it is: a copy may be under way that other ranks never join."""
        with self._changed:
            self._is_abandoned = True
            self._changed.notify()

    def give_up(self, ends: float) -> None:
        """Wait for a thread that was abandoned; then let its copy fail, or the store would keep parts of large files.

        Args:
            ends: how long it is waited for, by :func:`time.monotonic`.
        """
        self._join(ends)
        if self._thread.is_alive():
            self.tier.give_up()

    def release(self, ends: float) -> None:
        """Wait for a thread that was given up, and close the channel.

        Args:
            ends: how long it is waited for, by :func:`time.monotonic`.
        """
        self._join(ends)
        if not self._thread.is_alive():
            self._ranks.close()

    def _join(self, ends: float) -> None:
        if self._thread.ident is not None:
            self._thread.join(max(0.0, ends - time.monotonic()))

    # ---- On the thread

    def _work(self) -> None:
        try:
            while self._wait() and self._round():
                pass
        except RuntimeError as error:  # of the channel: a rank is gone, and perhaps the run with it
            if not self._is_abandoned:
                self._ended(_described(error))
        except BaseException as error:  # of any kind: nobody waits for this thread, so the status has to say it
            self._ended(_described(error), is_unexpected=True)
            raise

    def _wait(self) -> bool:
        """Wait for something to copy, and after a failure a while longer; return whether to go on."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._due) or self._closing_at is not None or self._is_abandoned)
            if self._attempts and not self._is_abandoned:
                pause = random.uniform(0.0, min(_LONGEST_PAUSE, 2.0 ** min(self._attempts, _DOUBLINGS)))
                was_closing = self._closing_at is not None
                self._changed.wait_for(
                    lambda: self._is_abandoned or (self._closing_at is not None and not was_closing),
                    pause if not was_closing else min(pause, 2.0),
                )
            return not self._is_abandoned

    def _round(self) -> bool:
        """Agree with the other ranks what to copy now, and try it; return whether to go on."""
        found = self._ranks.gather((self._proposed(), self._closing_at is not None))
        common = set.intersection(*(set(proposed) for proposed, _ in found))
        if common:  # what was committed last, which a clock that was set back may say otherwise
            return self._copied(next(each for each in reversed(found[0][0]) if each in common))
        if all(is_closing for _, is_closing in found):
            return False
        time.sleep(0.05)  # another rank has committed less, or is not closing yet
        return True

    def _proposed(self) -> list[Identity]:
        """Return what this rank can copy now: what is due, and while it closes the newest, if the time allows it."""
        with self._changed:
            if self._closing_at is None:
                return [job.identity for job in self._due]
            is_over = self._attempts_at_close >= _LAST_ATTEMPTS
            return [] if is_over else [job.identity for job in self._due[-1:] if self._fits(job, self._closing_at)]

    def _fits(self, job: Job, end: float) -> bool:
        needed = 0.0 if self._rate is None else job.bytes / self._rate * _MARGIN
        return time.monotonic() + needed < end

    def _copied(self, identity: Identity) -> bool:
        """Try to copy a checkpoint, on all ranks together; return whether the thread goes on."""
        with self._changed:
            self._copying = identity
            job = next(each for each in self._due if each.identity == identity)
        began = time.monotonic()
        is_there, failure = self._looked_for(job)
        if is_there:
            self._drop(job)
            self._forget_failures()
            return True
        failure = failure or self._copy(job)
        if failure is None:
            self._succeeded(job, time.monotonic() - began)
        elif failure.is_fenced:
            self._fenced_off = FencedOff(failure.message)
            self._ask_to_stop(failure.message)
            return False
        elif failure.is_unexpected:
            if self._ranks.rank == 0:
                logger.warning("%s: %s. Training goes on, without copies.", self.tier.label, failure.message)
            self._ended(failure.message, is_unexpected=True)
            return False
        elif failure.is_gone:
            logger.warning("%s is not copied to %s: %s", job.checkpoint.name, self.tier.label, failure.message)
            self._drop(job)
            self._forget_failures()
        else:
            self._failed(job, failure.message)
        return True

    def _looked_for(self, job: Job) -> tuple[bool, _Failure | None]:
        """Return whether an earlier start has copied a checkpoint, and why that is not known; alike on all ranks."""
        if not job.may_be_there:
            return False, None
        found: list[bool] = []

        def look() -> None:
            found.append(any(each.identity == job.identity for each in self.tier.checkpoints()))

        failure = self._attempt(look) if self._ranks.rank == 0 else None
        return self._ranks.gather((any(found), failure))[0]

    def _copy(self, job: Job) -> _Failure | None:
        """Copy a checkpoint, on all ranks together, and commit the copy; return why a rank could not."""
        began = time.monotonic()
        failures = self._ranks.gather(self._attempt(lambda: self.tier.copy(job.checkpoint.place, job.files)))
        if not any(failures):
            self._rate = job.bytes / max(time.monotonic() - began, 1e-3) or None
            is_leader = self._ranks.rank == 0
            failures = self._ranks.gather(self._attempt(lambda: self._commit(job)) if is_leader else None)
        return next((each for each in failures if each is not None), None)

    def _attempt(self, work: Callable[[], object]) -> _Failure | None:
        try:
            work()
        except FencedOff as error:
            return _Failure(error.message, is_fenced=True)
        except CheckpointDamaged as error:
            return _Failure(error.message, is_gone=True)
        except SHORTAGES as error:
            return _Failure(str(error) or type(error).__name__)
        except Exception as error:  # of any kind: the other ranks must learn of it, and then none copies any more
            return _Failure(_described(error), is_unexpected=True)
        return None

    def _commit(self, job: Job) -> None:
        self.tier.commit(job.checkpoint, self._generation)
        if self._settings.keep is not None:
            manifest = job.checkpoint.manifest
            self.tier.prune(self._settings.keep, now=self._clock(), best=manifest.best)

    def _drop(self, job: Job) -> None:
        """Forget a checkpoint, and those before it."""
        with self._changed:
            self._due = self._due[self._due.index(job) + 1 :]

    def _forget_failures(self) -> None:
        """Forget the failures so far: the next one is the first again."""
        self._attempts, self._failing_since, self._problem = 0, None, ""

    def _succeeded(self, job: Job, seconds: float) -> None:
        checkpoint = job.checkpoint
        if self._attempts and self._ranks.rank == 0:
            logger.info("%s holds %s; it is no longer behind.", self.tier.label, checkpoint.name)
        self._forget_failures()
        self._step = checkpoint.manifest.step
        self._drop(job)
        if self._ranks.rank == 0:
            self._record(
                "mirror",
                checkpoint=checkpoint.name,
                step=self._step,
                tier=self.tier.label,
                seconds_mirrored=round(seconds, 3),
                bytes=checkpoint.manifest.bytes,
            )

    def _failed(self, job: Job, message: str) -> None:
        if self._is_abandoned:
            return
        self._attempts += 1
        self._attempts_at_close += self._closing_at is not None
        self._problem = message
        if self._failing_since is None:
            self._failing_since = time.monotonic()
        if self._ranks.rank != 0:
            return
        if self._attempts == 1:
            logger.warning("mirror behind: %s: %s. Training goes on; it is tried again.", job.checkpoint.name, message)
            self._record("mirror-behind", behind=self.behind, tier=self.tier.label, reason=message)
        late = time.monotonic() - self._failing_since
        if self._settings.on_behind == "stop" and late >= self._timeout:
            self._ask_to_stop(f"{self.tier.label} is behind for {late:.0f} s: {message}")

    def _ended(self, reason: str, *, is_unexpected: bool = False) -> None:
        """Say that this thread copies nothing more. A launch copies again, and so does a block that is run again."""
        self._copying, self._problem = None, f"the copies have ended: {reason}"
        if self._ranks.rank != 0:
            return
        self._record("mirror-ended", behind=self.behind, tier=self.tier.label, reason=reason)
        if is_unexpected and self._settings.on_behind == "stop":
            self._ask_to_stop(f"{self.tier.label} gets no more copies: {reason}")

    def _record(self, event: str, **facts: Any) -> None:
        """Append to the journal. What its disk does not take now, it gets with the next entry: the copies go on."""
        self._unrecorded.append((event, facts))
        with contextlib.suppress(OSError):
            while self._unrecorded:
                event, facts = self._unrecorded[0]
                self._append(event, **facts)
                del self._unrecorded[0]


def _described(error: BaseException) -> str:
    """Return what an error is that nobody expected, and where it was raised: its message may be a single word."""
    *_, raised = traceback.extract_tb(error.__traceback__)
    said = hide_secrets(str(error), os.environ)
    return f"{type(error).__name__}{said and f': {said}'} ({Path(raised.filename).name}:{raised.lineno})"


def finish_all(mirrors: Sequence[TierMirror], seconds_left: float | None = None) -> None:
    """Wait for the copies of the newest checkpoint, which is due now; then end the threads. Every rank calls it.

    All are told before the first is waited for: two stores take as long as the slower one.

    Args:
        mirrors: the tiers.
        seconds_left: until the process is ended from outside; ``None`` if nobody knows.
    """
    for mirror in mirrors:
        mirror.ask_to_finish(seconds_left)
    for mirror in mirrors:
        mirror.wait_until_finished()


def close_all(mirrors: Sequence[TierMirror], seconds_left: float) -> None:
    """End the threads, without waiting for copies that other ranks may never join. Then close the channels.

    Args:
        mirrors: the tiers.
        seconds_left: for which a single rank may wait for them.
    """
    finish_all([mirror for mirror in mirrors if mirror.is_alone], seconds_left)
    for mirror in mirrors:
        mirror.abandon()
    ends = time.monotonic() + _LONGEST_GOODBYE
    for mirror in mirrors:
        mirror.give_up(ends)
    for mirror in mirrors:
        mirror.release(ends + _TO_GIVE_UP)
