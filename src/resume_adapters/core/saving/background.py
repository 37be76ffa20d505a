"""Commits on a background thread, over a channel of its own."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from resume_adapters.core.checkpoint import layout
from resume_adapters.core.checkpoint.commit import PendingCheckpoint
from resume_adapters.core.checkpoint.latest import Pointer
from resume_adapters.core.checkpoint.layout import superseded_path
from resume_adapters.core.checkpoint.manifest import Manifest
from resume_adapters.core.checkpoint.remove import fenced_off
from resume_adapters.core.ranks import Ranks, run_on_all_ranks
from resume_adapters.core.run_directory.journal import Journal
from resume_adapters.core.run_directory.prune import Pruner
from resume_adapters.core.run_directory.upkeep import set_aside
from resume_adapters.core.saving.engine import SaveRequest
from resume_adapters.core.staging.owned import OwnedStorage
from resume_adapters.core.staging.staging import StagedSave, Staging
from resume_adapters.core.storage.groups import StorageGroup
from resume_adapters.core.tiers.memory import MemoryTier
from resume_adapters.errors import ResumeError, SaveFailed

THREAD_NAME = "resume-adapters-commit"
"""How the names of the threads that commit begin."""


class ThreadSaveEngine:
    """A :class:`~resume_adapters.core.saving.engine.SaveEngine` with one background thread.

    Args:
        ranks: the ranks of the run, on a channel that the engine may use from its thread; it closes the channel.
        memory: where checkpoints are kept in memory; ``None``: nowhere.
        journal: the history of the run.
        pruner: applies the retention policy after each commit.
        latest: how ``latest`` names the newest checkpoint.
        on_committed: is called after each commit, on the thread, with the checkpoint's name, its manifest and the
            seconds since the save began.
        staging: captures the saves.
        on_dropped: is called on the thread for a save that is of no use, with the checkpoint's name, what has changed
            before it was copied, and whether it was to memory alone.
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
        on_dropped: Callable[[str, list[str], bool], None],
        memory: MemoryTier | None = None,
    ) -> None:
        self._ranks = ranks
        self._journal = journal
        self._pruner = pruner
        self._latest = latest
        self._on_committed = on_committed
        self._staging = staging
        self._on_dropped = on_dropped
        self._memory = memory
        self._last_submitted: int | None = None
        self._last_committed: int | None = None
        self._in_flight: list[Future[None]] = []
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=THREAD_NAME)

    @property
    def last_submitted(self) -> int | None:
        """Step of the newest checkpoint that is committed or being committed; the same on all ranks at one place."""
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
        self._run_later(functools.partial(self._release_after, request, self._commit))

    def submit_to_memory(self, memory: MemoryTier, request: SaveRequest) -> None:
        """Commit a checkpoint in memory; see :class:`SaveEngine`. Every rank calls it."""
        self._run_later(
            functools.partial(self._release_after, request, functools.partial(self._commit_to_memory, memory))
        )

    def submit_prune(self, group: StorageGroup, best: str | None) -> None:
        """Prune the run directory after the work submitted so far. Every rank calls it."""
        self._run_later(functools.partial(self._prune, group, best))

    def drain(self) -> None:
        """Wait for the work submitted so far, and raise its first error, once. Every rank calls it."""
        wait(self._in_flight)
        in_flight, self._in_flight = self._in_flight, []
        try:
            for each in in_flight:
                each.result()
        finally:
            # A save that failed or was dropped counts until here: what all ranks decide by it must not depend on when
            # the thread of each has dropped it.
            self._last_submitted = self._last_committed

    def close(self) -> None:
        """Wait for the work submitted so far, then end the thread and close the channel."""
        self._executor.shutdown()
        self._ranks.close()

    def _run_later(self, work: Callable[[], None]) -> None:
        self._in_flight.append(self._executor.submit(work))

    # ---- On the thread

    def _release_after(self, request: SaveRequest, work: Callable[[SaveRequest], Manifest | None]) -> None:
        """Do the work for a save, let go of all that it holds, and make what the next one needs."""
        try:
            manifest = work(request)
        finally:
            request.pending.release()
            if request.staged is not None:
                request.staged.close()
        if manifest is not None:
            self._prepare(manifest)

    def _write_marker(self, request: SaveRequest) -> Manifest | None:
        """Fill the files and commit; return ``None`` where the save was dropped."""
        if self._staging.is_wanted and self._is_dropped(request):
            return None
        fill = dict if request.staged is None else functools.partial(_fill, request.staged, request.complete)
        return request.pending.commit(self._ranks, request.files, request.describe, fill)

    def _commit_to_memory(self, memory: MemoryTier, request: SaveRequest) -> Manifest | None:
        """Commit a checkpoint in memory; what goes wrong there is said, and does not end the run."""
        try:
            manifest = self._write_marker(request)
        except ResumeError as error:
            memory.failed(self._ranks, error)
            return None
        if manifest is not None:
            memory.committed(request.pending, manifest)
        return manifest

    def _commit(self, request: SaveRequest) -> Manifest | None:
        pending, manifest = request.pending, self._write_marker(request)
        if manifest is None:
            return None
        self._last_committed = pending.step
        seconds = time.monotonic() - request.began
        self._on_committed(pending.path.name, manifest, seconds)
        run_on_all_ranks(
            self._ranks,
            lambda: self._after_commit(pending, manifest, seconds) if pending.storage_group.is_leader else None,
            f"prune after {pending.path.name}",
            functools.partial(_after_commit_failed, pending),
        )
        if self._memory is not None:
            self._memory.copy(self._ranks, pending.path, manifest, functools.partial(_captured, request))
        if pending.storage_group.is_leader and not request.is_last:
            pending.begin_next()
        return manifest

    def _prepare(self, manifest: Manifest) -> None:
        own = [entry for entry in manifest.files if entry.rank == self._ranks.rank]
        self._staging.prepare(sum(entry.bytes for entry in own if Path(entry.path).parts[0] != layout.EXTRAS))

    def _is_dropped(self, request: SaveRequest) -> bool:
        """Copy what was left for later; where something has changed before that, on any rank, drop the save on all."""
        changed: list[OwnedStorage] = []

        def copy() -> list[str]:
            if request.staged is not None:
                changed.extend(request.staged.copy())
            return self._staging.names(changed)

        names = [name for each in request.pending.write(copy, self._ranks) for name in each]
        if names:
            self._staging.drop(changed)
            request.pending.drop(self._ranks)
            self._on_dropped(request.pending.path.name, names, request.to_memory)
        return bool(names)

    def _after_commit(self, pending: PendingCheckpoint, manifest: Manifest, seconds: float) -> None:
        """Publish a checkpoint and prune, on the leaders of all run directories."""
        group = pending.storage_group

        def publish() -> None:
            name, reason, cursor = pending.path.name, manifest.reason, manifest.cursor
            pending.publish(self._latest)
            self._journal.append(
                "commit", step=pending.step, checkpoint=name, reason=reason, cursor=cursor, seconds=seconds
            )
            pending.complete()

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


def _captured(request: SaveRequest, file: Path) -> Iterator[memoryview] | None:
    """Return the content of a file of a save; ``None`` where nothing was captured of it."""
    path = request.pending.path
    if request.staged is None or not file.is_relative_to(path):
        return None
    return request.staged.read(file.relative_to(path))


def _fill(staged: StagedSave, complete: Callable[[], object]) -> dict[Path, tuple[int, str]]:
    """Fill the files, and write meanwhile what is known only now."""
    with ThreadPoolExecutor(1) as thread:
        completing = thread.submit(complete)
        filled = staged.fill()
        completing.result()
    return filled


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
