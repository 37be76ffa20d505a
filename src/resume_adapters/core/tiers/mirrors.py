"""All tiers of one start of a run: opened and claimed at its begin, written to while it trains, finished at its end."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from resume_adapters.core.checkpoint.manifest import Manifest
from resume_adapters.core.log import logger
from resume_adapters.core.ranks import Ranks, run_on_all_ranks
from resume_adapters.core.run_directory.journal import Journal
from resume_adapters.core.run_directory.status import MirrorStatus, job_number
from resume_adapters.core.storage.base import Storage
from resume_adapters.core.storage.groups import StorageGroup
from resume_adapters.core.tiers.mirror import Job, TierMirror, close_all, finish_all
from resume_adapters.core.tiers.object_store import ObjectStore
from resume_adapters.core.tiers.options import Remote
from resume_adapters.core.tiers.remote import RemoteTier, place_of
from resume_adapters.core.tiers.tier import LocalFile, TierCheckpoint
from resume_adapters.errors import TierUnavailable, UnsupportedSetting

_USED: dict[str, Path] = {}
"""The run directory of each URL that a run of this process has used."""

_TOKEN = 12
"""Digits of a start's token that the keys have."""

_LONGEST_CLOSE = 30.0
"""Seconds for which a run that has not waited for its last copies waits at its close."""

LONGEST_COPY = timedelta(days=7)
"""How long a rank waits for the others, of which one may copy all large files. One that is gone is noticed anyway."""


def open_tier(
    mirror: Remote, storage: Storage, token: str, group: str = "", environment: Mapping[str, str] | None = None
) -> RemoteTier:
    """Return the tier that a user has asked for.

    Args:
        mirror: what the user wrote.
        storage: the file operations of the run directory.
        token: identifies this start.
        group: names the ranks that share the run directory, where not all do.
        environment: the environment variables; those of the process by default.

    Raises:
        MissingFramework: what it needs is not installed.
    """
    url = f"{mirror.url.rstrip('/')}/{group}" if group else mirror.url
    job = f"job {job_number()}, " if job_number() else ""
    given = os.environ if environment is None else environment
    owner = f"{job}on {socket.gethostname()}, {token[:_TOKEN]}"
    return RemoteTier(ObjectStore(url, mirror.timeout, given), storage, owner)


class Mirrors:
    """The tiers of a run.

    Args:
        mirrors: what the user wrote; none: nothing here does anything.
        storage: the file operations of the run directory.
        directory: the run directory.
        journal: the history of the run.
        ask_to_stop: asks the run to stop, with the reason.
        clock: returns seconds since 1970.
    """

    def __init__(
        self,
        mirrors: Sequence[Remote],
        storage: Storage,
        directory: Path,
        journal: Journal,
        ask_to_stop: Callable[[str], object],
        clock: Callable[[], float],
    ) -> None:
        self._settings = tuple(replace(each, url=each.url.replace("{run}", directory.name)) for each in mirrors)
        self._storage = storage
        self._directory = directory
        self._journal = journal
        self._ask_to_stop = ask_to_stop
        self._clock = clock
        self._mirrors: list[TierMirror] = []
        self._group: StorageGroup | None = None
        self._token = ""

    def __bool__(self) -> bool:
        return bool(self._settings)

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
        if not self._settings:
            return
        self._group = group
        self._token = ranks.gather(token)[group.leader]
        name = f"ranks-{group.leader:05d}" if group.is_partial else ""
        tiers: list[RemoteTier] = []

        def open_all() -> None:
            for settings in self._settings:
                self._require_own(settings.url)
                tiers.append(open_tier(settings, self._storage, self._token, name))

        run_on_all_ranks(ranks, open_all, "open the mirrors")
        for settings, tier in zip(self._settings, tiers, strict=True):
            self._mirrors.append(
                TierMirror(
                    tier,
                    settings,
                    settings.timeout.total_seconds(),
                    group_ranks(ranks, group),
                    self._journal.append,
                    self._ask_to_stop,
                    self._clock,
                )
            )

    def _require_own(self, url: str) -> None:
        """Refuse a URL that another training of this process has used: this one would resume from its checkpoints.

        Raises:
            UnsupportedSetting: its run directory is still there.
        """
        former = _USED.setdefault(url, self._directory)
        if former != self._directory and self._storage.exists(former):
            raise UnsupportedSetting(
                f"the mirror {url} has the copies of the run in {former}, and this run is in {self._directory}; "
                f"expected a URL for each run: {url}/{{run}} has the name of the run directory in it"
            )
        _USED[url] = self._directory

    @property
    def tiers(self) -> list[RemoteTier]:
        """The tiers, in the user's order."""
        return [mirror.tier for mirror in self._mirrors]

    def claim(self, after: int) -> int:
        """Claim all tiers, and return a generation that is later than any known. The leader calls it.

        Args:
            after: the highest generation that is known in the run directory.
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
        if not self._mirrors:
            return
        assert self._group is not None, "the tiers are open"
        place = place_of(name, manifest.generation, self._token[:_TOKEN], manifest.written)
        owner = self._group.owner_in_group
        mine = [entry for entry in manifest.files if owner(entry.rank) == self._group.rank]
        files = LocalFile.of(self._storage, self._directory / name, mine)
        for mirror in self._mirrors:
            mirror.submit(Job(TierCheckpoint(place, name, manifest), files, may_be_there))

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
            mirror.require_owned()

    def finish(self, ends: float | None = None) -> None:
        """Wait for the last copies, as long as that is allowed. Every rank calls it.

        Args:
            ends: when the process is ended from outside, in seconds since 1970; ``None`` if nobody knows.
        """
        finish_all(self._mirrors, None if ends is None else ends - self._clock())

    def close(self, ends: float | None = None) -> None:
        """End the threads, and release what the tiers hold; a run that has failed does not wait for long.

        Args:
            ends: see :meth:`finish`.
        """
        mirrors, self._mirrors = self._mirrors, []
        close_all(mirrors, _LONGEST_CLOSE if ends is None else min(_LONGEST_CLOSE, ends - self._clock()))


def group_ranks(ranks: Ranks, group: StorageGroup) -> Ranks:
    """Return the ranks that share a run directory, with a channel for copies. Every rank of the run calls it."""
    if not group.is_partial:
        return ranks.new_channel(LONGEST_COPY)
    made = {members: ranks.subset(members, LONGEST_COPY) for members in sorted(set(ranks.gather(group.members)))}
    for members, channel in made.items():
        if members != group.members:
            channel.close()
    return made[group.members]
