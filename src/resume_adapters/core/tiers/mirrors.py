"""Copies the committed checkpoints of a run to object stores, in the background. It never stops the training by itself.

For each store every rank has a thread. They copy as a save is committed: the leader says which checkpoint is next, each
rank copies the files that it answers for, and the leader writes the manifest. The next one is the newest that is due;
older ones are left out, because a resume takes the newest. A copy that fails is tried again, at growing intervals with
jitter, until it succeeds or a newer one takes its place.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from resume_adapters.core.checkpoint.manifest import FileEntry, Manifest
from resume_adapters.core.log import logger
from resume_adapters.core.ranks import Ranks, run_on_all_ranks
from resume_adapters.core.run_directory.journal import Journal
from resume_adapters.core.run_directory.status import MirrorStatus, job_number
from resume_adapters.core.storage.base import Storage
from resume_adapters.core.storage.groups import StorageGroup
from resume_adapters.core.tiers.hub import HubStore
from resume_adapters.core.tiers.object_store import ObjectStore, hide_secrets
from resume_adapters.core.tiers.options import Remote, is_hub
from resume_adapters.core.tiers.remote import RemoteTier, place_of
from resume_adapters.core.tiers.tier import TierCheckpoint
from resume_adapters.errors import CheckpointDamaged, FencedOff, ResumeError, TierUnavailable, UnsupportedSetting

MIRROR_THREAD = "resume-adapters-mirror"
"""The name of the threads."""

LONGEST_COPY = timedelta(days=7)
"""How long a rank waits for the others, of which one may copy all large files. One that is gone is noticed anyway."""

_LONGEST_PAUSE, _LONGEST_LAST_PAUSE = 60.0, 2.0
"""Seconds between two attempts, at most: while the run trains, and when it ends."""

_LAST_ATTEMPTS = 3
"""How often the last copy of a run is tried."""

_LONGEST_CLOSE, _LONGEST_GOODBYE = 30.0, 2.0
"""Seconds for which a run that has failed waits for its copies: one of a single process, and one of several."""

_TO_GIVE_UP = 0.5
"""Seconds in which a store can be told to forget the parts of a file that is not copied on."""

_TO_LEAVE = 2.0
"""Seconds that a process needs to leave, after it has waited for its last copy."""

_MARGIN = 1.5
"""By how much a copy may be slower than the one before it and still be done in time."""

_USED: dict[str, Path] = {}
"""The run directory of each URL that a run of this process has used."""


class _Job(NamedTuple):
    """A committed checkpoint that is due on a tier.

    Attributes:
        number: of the commit; the same on all ranks.
        checkpoint: where it goes.
        may_be_there: an earlier start may have copied it.
    """

    number: int
    checkpoint: TierCheckpoint
    may_be_there: bool


@dataclass(eq=False)
class TierMirror:
    """Copies to one tier.

    Attributes:
        tier: the tier.
        settings: what the user has set for it.
        ranks: those that share the run directory, on a channel for the thread, which it closes. The first one leads.
        own_files: returns where a checkpoint is in the run directory, and the files that this rank answers for.
        append: appends an entry to the journal.
        ask_to_stop: asks the run to stop, with the reason.
        clock: returns seconds since 1970.
        fenced_off: a later start owns the tier; ``None``: not as far as the thread has seen.
    """

    tier: RemoteTier
    settings: Remote
    ranks: Ranks
    own_files: Callable[[TierCheckpoint], tuple[Path, Sequence[FileEntry]]]
    append: Callable[..., object]
    ask_to_stop: Callable[[str], object]
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self.fenced_off: FencedOff | None = None
        self._timeout = self.settings.timeout.total_seconds()
        self._leads = self.ranks.rank == 0
        self._changed = threading.Condition()
        self._due: list[_Job] = []
        self._copying: _Job | None = None
        self._left_out: _Job | None = None
        self._submitted = self._commits = self._done = self._generation = self._attempts = 0
        self._closing_at: float | None = None
        self._abandoned_at: float | None = None
        self._failing_since: float | None = None
        self._problem = ""
        self._rate: float | None = None
        self._step: int | None = None
        self._thread = threading.Thread(target=self._work, name=MIRROR_THREAD, daemon=True)

    # ---- From the run's own threads

    def start(self, generation: int) -> None:
        """Start the thread.

        Args:
            generation: of this start.
        """
        self._generation = generation
        self._thread.start()

    def submit(self, checkpoint: TierCheckpoint, *, may_be_there: bool = False) -> None:
        """Count a commit, and copy it if it is due. Every rank calls it for the same commits in the same order.

        Args:
            checkpoint: where it goes.
            may_be_there: an earlier start has committed it, and may have copied it.
        """
        is_due = may_be_there or self._commits % self.settings.every == 0
        self._commits += not may_be_there
        self._submitted += 1
        job = _Job(self._submitted, checkpoint, may_be_there)
        with self._changed:
            self._left_out = None if is_due else job
            if is_due:
                self._add(job)

    def _add(self, job: _Job) -> None:
        if job.number > self._done:  # the leader may have been first
            self._due.append(job)
            self._changed.notify()

    @property
    def state(self) -> MirrorStatus:
        """What ``status.json`` says of the tier."""
        return MirrorStatus(tier=self.tier.label, step=self._step, behind=len(self._due), problem=self._problem)

    @property
    def held(self) -> set[str]:
        """The names of what retention must leave in the run directory: what is being copied, and what is next."""
        with self._changed:
            return {job.checkpoint.name for job in self._due if job in (self._copying, self._due[-1])}

    def ask_to_finish(self, seconds_left: float | None) -> bool:
        """Let the newest checkpoint be due now, and the thread end once it is copied; see :func:`finish_all`.

        Only here is it known that a save was the last one: a trainer saves at its last step as at any other.

        Args:
            seconds_left: until the process is ended from outside; a copy that does not fit is not begun.

        Returns:
            Whether it is the first time.
        """
        with self._changed:
            if self._closing_at is not None:
                return False
            left = self._timeout if seconds_left is None else min(self._timeout, seconds_left - _TO_LEAVE)
            self._closing_at, self._attempts = time.monotonic() + left, 0
            if self._left_out is not None:
                self._add(self._left_out)
            self._changed.notify()
            return True

    def wait_until_finished(self) -> None:
        """Wait for a thread that was asked to finish, and say what it has not copied."""
        assert self._closing_at is not None, "it was asked to"
        self._join(self._closing_at)  # a store that hangs keeps nobody
        due = self._due  # the thread may copy it at any moment
        if due and self.fenced_off is None and self._leads:
            logger.warning(
                "the run ends with its mirror behind: %s lacks %s%s. The run directory has it: resume-adapters push.",
                self.tier.label,
                due[-1].checkpoint.name,
                f" ({self._problem})" if self._problem else ", which would not have been copied in the time left",
            )

    def abandon(self, at: float) -> None:
        """Keep the thread from beginning another copy: other ranks may never join it.

        Args:
            at: when the copy that is under way is given up, by :func:`time.monotonic`.
        """
        with self._changed:
            self._abandoned_at = at
            self._changed.notify()

    def close(self, ends: float) -> None:
        """Wait for a thread that was abandoned, and close the channel.

        Args:
            ends: how long it is waited for, by :func:`time.monotonic`.
        """
        self._join(ends)
        if not self._thread.is_alive():
            self.ranks.close()

    def _join(self, ends: float) -> None:
        if self._thread.ident is not None:
            self._thread.join(max(0.0, ends - time.monotonic()))

    # ---- On the thread

    def _work(self) -> None:
        try:
            while self._wait():
                job = self.ranks.broadcast(self._next() if self._leads else None, 0)
                if job is None or not self._copy(job):
                    return
        except RuntimeError as error:  # of the channel: a rank is gone, and perhaps the run with it
            if self._abandoned_at is None:
                self._ended(_described(error))
        except BaseException as error:  # of any kind: nobody waits for this thread, so the status has to say it
            self._ended(_described(error), is_unexpected=True)
            raise

    def _wait(self) -> bool:
        """Wait for something to copy, and after a failure a while longer; return whether to go on."""
        with self._changed:
            self._changed.wait_for(lambda: self._due or self._closing_at or self._abandoned_at)
            if self._attempts and self._leads:
                closing = self._closing_at
                longest = _LONGEST_PAUSE if closing is None else _LONGEST_LAST_PAUSE
                pause = random.uniform(0.0, min(longest, 2.0 ** min(self._attempts, 6)))
                self._changed.wait_for(lambda: self._abandoned_at or self._closing_at != closing, pause)
            return self._abandoned_at is None

    def _next(self) -> _Job | None:
        """Return what the ranks copy now; ``None``: nothing more."""
        with self._changed:
            job = self._due[-1] if self._due else None
            if job is not None and self._closing_at is not None:
                needed = 0.0 if self._rate is None else job.checkpoint.manifest.bytes / self._rate * _MARGIN
                is_over = self._attempts >= _LAST_ATTEMPTS or time.monotonic() + needed >= self._closing_at
                job = None if is_over else job
            self._copying = job
            return job

    def _copy(self, job: _Job) -> bool:
        """Try to copy a checkpoint, on all ranks together; return whether the thread goes on."""
        began, checkpoint = time.monotonic(), job.checkpoint
        is_there, failure = self._looked_for(job)
        if failure is None and not is_there:
            failure = self._on_all(lambda: self._copy_own_files(checkpoint)) or self._on_all(
                lambda: self._commit(checkpoint) if self._leads else None
            )
        match failure:
            case None:
                if not is_there:
                    self._succeeded(checkpoint, time.monotonic() - began)
                self._finished(job)
            case CheckpointDamaged():
                logger.warning("%s is not copied to %s: %s", checkpoint.name, self.tier.label, failure)
                self._finished(job)
            case FencedOff():
                self.fenced_off = failure
                self.ask_to_stop(failure.message)
            case ResumeError():
                self._failed(job, failure.message)
            case _:
                if self._leads:
                    logger.warning("%s: %s. Training goes on, without copies.", self.tier.label, failure)
                self._ended(str(failure), is_unexpected=True)
                return False
        return self.fenced_off is None

    def _copy_own_files(self, checkpoint: TierCheckpoint) -> None:
        self.tier.copy(checkpoint.place, *self.own_files(checkpoint), self._require_wanted)
        if not self._leads:  # the leader stores its files with the manifest
            self.tier.flush()

    def _looked_for(self, job: _Job) -> tuple[bool, Exception | None]:
        """Return whether an earlier start has copied a checkpoint, and why that is not known; alike on all ranks."""
        if not job.may_be_there:
            return False, None
        found: list[bool] = []

        def look() -> None:
            found.extend(each.identity == job.checkpoint.identity for each in self.tier.checkpoints())

        failure = self._on_all(look if self._leads else bool)
        return self.ranks.broadcast(any(found), 0), failure

    def _on_all(self, work: Callable[[], object]) -> Exception | None:
        """Do a part of a copy, on all ranks together; return why a rank could not, alike on all."""
        return next((each for each in self.ranks.gather(_attempt(work)) if each is not None), None)

    def _require_wanted(self) -> None:
        if self._abandoned_at is not None and time.monotonic() > self._abandoned_at:
            raise TierUnavailable(f"{self.tier.label} gets nothing more: this run ends")

    def _commit(self, checkpoint: TierCheckpoint) -> None:
        self.tier.commit(checkpoint, self._generation)
        if self.settings.keep is not None:
            self.tier.prune(self.settings.keep, now=self.clock(), best=checkpoint.manifest.best)

    def _finished(self, job: _Job) -> None:
        """Forget a checkpoint and those before it, and the failures so far: the next one is the first again."""
        with self._changed:
            self._done = job.number
            self._due = [each for each in self._due if each.number > job.number]
        self._attempts, self._failing_since, self._problem = 0, None, ""

    def _succeeded(self, checkpoint: TierCheckpoint, seconds: float) -> None:
        self._step, size = checkpoint.manifest.step, checkpoint.manifest.bytes
        self._rate = size / max(seconds, 1e-3) or None
        if not self._leads:
            return
        if self._failing_since is not None:
            logger.info("%s holds %s; it is no longer behind.", self.tier.label, checkpoint.name)
        facts = {"step": self._step, "seconds_mirrored": round(seconds, 3), "bytes": size}
        self._record("mirror", checkpoint=checkpoint.name, **facts)

    def _failed(self, job: _Job, message: str) -> None:
        if self._abandoned_at is not None:
            return
        is_first = self._failing_since is None
        self._attempts, self._problem = self._attempts + 1, message
        self._failing_since = time.monotonic() if self._failing_since is None else self._failing_since
        if not self._leads:
            return
        if is_first:
            name = job.checkpoint.name
            logger.warning("mirror behind: %s: %s. Training goes on; it is tried again.", name, message)
            self._record("mirror-behind", behind=len(self._due), reason=message)
        late = time.monotonic() - self._failing_since
        if self.settings.on_behind == "stop" and late >= self._timeout:
            self.ask_to_stop(f"{self.tier.label} is behind for {late:.0f} s: {message}")

    def _ended(self, reason: str, *, is_unexpected: bool = False) -> None:
        """Say that this thread copies nothing more. A launch copies again, and so does a block that is run again."""
        self._copying, self._problem = None, f"the copies have ended: {reason}"
        if not self._leads:
            return
        self._record("mirror-ended", behind=len(self._due), reason=reason)
        if is_unexpected and self.settings.on_behind == "stop":
            self.ask_to_stop(f"{self.tier.label} gets no more copies: {reason}")

    def _record(self, event: str, **facts: Any) -> None:
        """Append to the journal, if its disk takes it: the copies go on."""
        with contextlib.suppress(OSError):
            self.append(event, tier=self.tier.label, **facts)


def _attempt(work: Callable[[], object]) -> Exception | None:
    """Return what ``work`` raises, as all ranks can be told: one that may succeed later is a ``ResumeError``."""
    try:
        work()
    except ResumeError as error:
        return error
    except (OSError, RuntimeError, MemoryError) as error:  # what a machine lacks; RuntimeError: threads
        return TierUnavailable(str(error) or type(error).__name__)
    except Exception as error:  # of any kind: the other ranks must learn of it, and then none copies any more
        return AssertionError(_described(error))
    return None


def _described(error: BaseException) -> str:
    """Return what an error is that nobody expected, and where it was raised: its message may be a single word."""
    *_, raised = traceback.extract_tb(error.__traceback__)
    said = hide_secrets(str(error), os.environ)
    return f"{type(error).__name__}{said and f': {said}'} ({Path(raised.filename).name}:{raised.lineno})"


def finish_all(mirrors: Sequence[TierMirror], seconds_left: float | None = None) -> None:
    """Wait for the copies of the newest checkpoint, which is due now; then end the threads. Every rank calls it.

    All are told before the first is waited for: two stores take as long as the slower one. The second time it does
    nothing.

    Args:
        mirrors: the tiers.
        seconds_left: until the process is ended from outside; ``None`` if nobody knows.
    """
    for mirror in [each for each in mirrors if each.ask_to_finish(seconds_left)]:
        mirror.wait_until_finished()


def close_all(mirrors: Sequence[TierMirror], seconds_left: float) -> None:
    """End the threads, without waiting for copies that other ranks may never join. Then close the channels.

    Args:
        mirrors: the tiers.
        seconds_left: for which a single rank may wait for them.
    """
    finish_all([mirror for mirror in mirrors if mirror.ranks.world_size == 1], seconds_left)
    ends = time.monotonic() + _LONGEST_GOODBYE
    for mirror in mirrors:
        mirror.abandon(ends)
    for mirror in mirrors:
        mirror.close(ends + _TO_GIVE_UP)


def open_tier(mirror: Remote, storage: Storage, token: str, group: str = "", *, makes: bool = False) -> RemoteTier:
    """Return the tier that a user has asked for.

    Args:
        mirror: what the user wrote.
        storage: the file operations of the run directory.
        token: identifies this start.
        group: names the ranks that share the run directory, where not all do.
        makes: make a repository of the Hub that does not exist.

    Raises:
        MissingFramework: what it needs is not installed.
    """
    url = f"{mirror.url.rstrip('/')}/{group}" if group else mirror.url
    job = f"job {job_number()}, " if job_number() else ""
    store = HubStore(url, mirror.timeout, makes=makes) if is_hub(url) else ObjectStore(url, mirror.timeout)
    return RemoteTier(store, storage, f"{job}on {socket.gethostname()}, {token}")


@dataclass(eq=False)
class Mirrors:
    """The object stores to which one start of a run copies its checkpoints.

    Attributes:
        settings: what the user wrote; none: nothing here does anything.
        storage: the file operations of the run directory.
        directory: the run directory.
        journal: the history of the run.
        ask_to_stop: asks the run to stop, with the reason.
        clock: returns seconds since 1970.
    """

    settings: Sequence[Remote]
    storage: Storage
    directory: Path
    journal: Journal
    ask_to_stop: Callable[[str], object]
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self.settings = [replace(each, url=each.url.replace("{run}", self.directory.name)) for each in self.settings]
        self._mirrors: list[TierMirror] = []
        self._token = ""

    def connect(self, ranks: Ranks, group: StorageGroup, token: str) -> None:
        """Make the tiers. Every rank calls it; nothing is read or written yet.

        Args:
            ranks: the ranks of the run.
            group: those that share the run directory.
            token: of this start; that of the group's leader is used.

        Raises:
            MissingFramework: what a tier needs is not installed.
            PeerFailed: another rank could not make one.
        """
        if not self.settings:
            return
        self._token = ranks.gather(token)[group.leader][:12]
        name = f"ranks-{group.leader:05d}" if group.is_partial else ""
        tiers: list[RemoteTier] = []

        def open_all() -> None:
            for settings in self.settings:
                self._require_own(settings.url)
                tiers.append(open_tier(settings, self.storage, self._token, name, makes=True))

        def own_files(found: TierCheckpoint) -> tuple[Path, list[FileEntry]]:
            mine = [each for each in found.manifest.files if group.owner_in_group(each.rank) == group.rank]
            return self.directory / found.name, mine

        run_on_all_ranks(ranks, open_all, "open the mirrors")
        for settings, tier in zip(self.settings, tiers, strict=True):
            channel = group_ranks(ranks, group)
            self._mirrors.append(
                TierMirror(tier, settings, channel, own_files, self.journal.append, self.ask_to_stop, self.clock)
            )

    def _require_own(self, url: str) -> None:
        """Refuse a URL that another training of this process has used: this one would resume from its checkpoints.

        Raises:
            UnsupportedSetting: its run directory is still there.
        """
        former = _USED.setdefault(url, self.directory)
        if former != self.directory and self.storage.exists(former):
            raise UnsupportedSetting(
                f"the mirror {url} has the copies of the run in {former}, and this run is in {self.directory}; "
                f"expected a URL for each run: {url}/{{run}} has the name of the run directory in it"
            )
        _USED[url] = self.directory

    @property
    def tiers(self) -> list[RemoteTier]:
        """The tiers, in the user's order."""
        return [mirror.tier for mirror in self._mirrors]

    def claim(self, after: int) -> int:
        """Claim all tiers, and return a generation that is later than any known. The leader calls it.

        Args:
            after: the highest generation that is known in the run directory.

        Raises:
            UnsupportedSetting: a store overwrites what exists.
        """
        generation = after + 1
        for tier in self.tiers:
            try:
                generation = max(generation, tier.claims.take(generation - 1))
            except TierUnavailable as error:  # it is claimed before the first copy
                logger.warning("%s is not claimed yet: %s", tier.label, error)
        return generation

    def start(self, generation: int) -> None:
        """Start to copy.

        Args:
            generation: of this start.
        """
        for mirror in self._mirrors:
            mirror.start(generation)

    def submit(self, name: str, manifest: Manifest, *, may_be_there: bool = False) -> None:
        """Copy a committed checkpoint to the tiers where it is due. Every rank calls it for each commit, in order.

        Args:
            name: the checkpoint.
            manifest: what it contains.
            may_be_there: an earlier start has committed it, and may have copied it.
        """
        place = place_of(name, manifest.generation, self._token, manifest.written)
        for mirror in self._mirrors:
            mirror.submit(TierCheckpoint(place, name, manifest), may_be_there=may_be_there)

    def held(self) -> dict[str, str]:
        """Return the checkpoints that retention must leave, each with the reason."""
        return {name: f"is being copied to {each.tier.label}" for each in self._mirrors for name in each.held}

    @property
    def states(self) -> list[MirrorStatus]:
        """What ``status.json`` says of the tiers."""
        return [mirror.state for mirror in self._mirrors]

    def require_owned(self) -> None:
        """Check what the copies have found.

        Raises:
            FencedOff: a later start has claimed a tier.
        """
        for mirror in self._mirrors:
            if mirror.fenced_off is not None:
                raise mirror.fenced_off

    def finish(self, ends: float | None = None) -> None:
        """Wait for the last copies, as long as that is allowed. Every rank calls it.

        Args:
            ends: when the process is ended from outside, in seconds since 1970; ``None`` if nobody knows.
        """
        finish_all(self._mirrors, None if ends is None else ends - self.clock())

    def close(self, ends: float | None = None) -> None:
        """End the threads, and release what the tiers hold; a run that has failed does not wait for long.

        Args:
            ends: see :meth:`finish`.
        """
        mirrors, self._mirrors = self._mirrors, []
        close_all(mirrors, _LONGEST_CLOSE if ends is None else min(_LONGEST_CLOSE, ends - self.clock()))


def group_ranks(ranks: Ranks, group: StorageGroup) -> Ranks:
    """Return the ranks that share a run directory, with a channel for copies. Every rank of the run calls it."""
    if not group.is_partial:
        return ranks.new_channel(LONGEST_COPY)
    made = {members: ranks.subset(members, LONGEST_COPY) for members in sorted(set(ranks.gather(group.members)))}
    for members, channel in made.items():
        if members != group.members:
            channel.close()
    return made[group.members]
