"""Commits on a background thread, over a channel of its own."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from resume_adapters.core.checkpoint import layout
from resume_adapters.core.checkpoint.commit import PendingCheckpoint
from resume_adapters.core.checkpoint.layout import superseded_path
from resume_adapters.core.checkpoint.manifest import Manifest
from resume_adapters.core.checkpoint.remove import fenced_off
from resume_adapters.core.ranks import Ranks, run_on_all_ranks
from resume_adapters.core.run_directory.journal import Journal
from resume_adapters.core.run_directory.prune import Pruner
from resume_adapters.core.run_directory.upkeep import set_aside
from resume_adapters.core.saving.engine import SaveRequest
from resume_adapters.core.staging.staging import Staging
from resume_adapters.core.storage.base import Pointer
from resume_adapters.core.storage.groups import StorageGroup
from resume_adapters.errors import ResumeError, SaveFailed

THREAD_NAME = "resume-adapters-commit"
"""How the names of the threads that commit begin."""


class ThreadSaveEngine:
    """A :class:`~resume_adapters.core.saving.engine.SaveEngine` with one background thread.

    Args:
        ranks: the ranks of the run, on a channel that the engine may use from its thread; it closes the channel.
        journal: the history of the run.
        pruner: applies the retention policy after each commit.
        latest: how ``latest`` names the newest checkpoint.
        on_committed: is called after each commit, on the thread, with the checkpoint's name, its manifest and the
            seconds since the save began.
        staging: captures the saves.
        on_dropped: is called on the thread for a save that is of no use, with the checkpoint's name and what has
            changed before it was copied.
    """

    def __init__(
        self,
        ranks: Ranks,
        journal: Journal,
        pruner: Pruner,
        *,
        latest: Pointer,
        on_committed: Callable[[str, Manifest, float], None],
        staging: Staging,
        on_dropped: Callable[[str, list[str]], None],
    ) -> None:
        self._ranks = ranks
        self._journal = journal
        self._pruner = pruner
        self._latest = latest
        self._on_committed = on_committed
        self._staging = staging
        self._on_dropped = on_dropped
        self._last_submitted: int | None = None
        self._last_committed: int | None = None
        self._in_flight: list[Future[None]] = []
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=THREAD_NAME)

    @property
    def last_submitted(self) -> int | None:
        """Step of the newest checkpoint that is committed or being committed."""
        return self._last_submitted

    @property
    def last_committed(self) -> int | None:
        """Step of the newest checkpoint that is committed."""
        return self._last_committed

    @property
    def in_flight(self) -> tuple[Future[None], ...]:
        """The commits and prunes that :meth:`drain` would wait for."""
        return tuple(self._in_flight)

    def continue_from(self, step: int) -> None:
        """Count the checkpoint from which the run resumes as the last one committed."""
        self._last_submitted = self._last_committed = step

    def submit(self, request: SaveRequest) -> None:
        """Commit a checkpoint, then publish it and prune the run directory. Every rank calls it."""
        self._last_submitted = request.pending.step
        self._run_later(functools.partial(self._commit, request))

    def submit_prune(self, group: StorageGroup, best: str | None) -> None:
        """Prune the run directory after the work submitted so far. Every rank calls it."""
        self._run_later(functools.partial(self._prune, group, best))

    def drain(self) -> None:
        """Wait for the work submitted so far, and raise its first error, once."""
        in_flight, self._in_flight = self._in_flight, []
        try:
            for each in in_flight:
                each.result()
        except BaseException:
            self._last_submitted = self._last_committed
            raise

    def close(self) -> None:
        """Wait for the work submitted so far, then end the thread and close the channel."""
        self._executor.shutdown()
        self._ranks.close()

    def _run_later(self, work: Callable[[], None]) -> None:
        self._in_flight.append(self._executor.submit(work))

    # ---- On the thread

    def _commit(self, request: SaveRequest) -> None:
        pending, staged = request.pending, request.staged
        try:
            if self._staging.is_wanted and self._is_dropped(request):
                return
            fill = dict if staged is None else staged.fill
            manifest = pending.commit(self._ranks, request.files, request.describe, fill)
        finally:
            if staged is not None:
                staged.close()
        self._last_committed = pending.step
        seconds = time.monotonic() - request.began
        self._on_committed(pending.path.name, manifest, seconds)
        run_on_all_ranks(
            self._ranks,
            lambda: self._after_commit(pending, manifest, seconds) if pending.storage_group.is_leader else None,
            f"prune after {pending.path.name}",
            functools.partial(_after_commit_failed, pending),
        )
        own = [entry for entry in manifest.files if entry.rank == self._ranks.rank]
        self._staging.prepare(sum(entry.bytes for entry in own if Path(entry.path).parts[0] != layout.EXTRAS))

    def _is_dropped(self, request: SaveRequest) -> bool:
        """Copy what was left for later; where something has changed before that, on any rank, drop the save on all."""
        changed = [] if request.staged is None else request.staged.copy()
        names = [name for each in self._ranks.gather(self._staging.names(changed)) for name in each]
        if names:
            self._staging.drop(changed)
            request.pending.drop(self._ranks)
            self._last_submitted = self._last_committed
            self._on_dropped(request.pending.path.name, names)
        return bool(names)

    def _after_commit(self, pending: PendingCheckpoint, manifest: Manifest, seconds: float) -> None:
        """Publish a checkpoint and prune, on the leaders of all run directories."""
        group = pending.storage_group

        def publish() -> None:
            name, reason, cursor = pending.path.name, manifest.reason, manifest.cursor
            try:
                pending.publish(self._latest)
                self._journal.append(
                    "commit", step=pending.step, checkpoint=name, reason=reason, cursor=cursor, seconds=seconds
                )
                pending.complete()
            finally:
                pending.release()

        # Every node has committed its part before any of them prunes.
        run_on_all_ranks(group.leaders, publish, f"announce {pending.path.name}")
        self._pruner.prune(group, manifest.best, just_committed=pending.path.name)
        replaced = superseded_path(pending.path)
        if layout.root_paths(pending.storage, replaced):  # it is damaged, or pruning would have removed it
            set_aside(pending.storage, replaced, pending.fence)

    def _prune(self, group: StorageGroup, best: str | None) -> None:
        run_on_all_ranks(
            self._ranks,
            lambda: self._pruner.prune(group, best) if group.is_leader else None,
            "prune",
            functools.partial(_prune_failed, self._pruner),
        )


def _after_commit_failed(pending: PendingCheckpoint, cause: Exception) -> ResumeError:
    return fenced_off(pending.fence) or SaveFailed(
        f"{pending.path.name} is committed, but what follows a commit (latest, journal, retention) failed: {cause}. "
        "Nothing is lost: fix permissions or free space, then launch the same command again",
        path=pending.path,
        step=pending.step,
    )


def _prune_failed(pruner: Pruner, cause: Exception) -> ResumeError:
    return fenced_off(pruner.fence) or SaveFailed(
        f"could not prune {pruner.directory}: {cause}. Nothing is lost", path=pruner.directory
    )
