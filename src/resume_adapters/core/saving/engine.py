"""Who finishes a save: threads that commit, one after the other, over a channel of their own."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from resume_adapters.core.checkpoint import layout
from resume_adapters.core.checkpoint.commit import PendingCheckpoint
from resume_adapters.core.checkpoint.layout import Pointer
from resume_adapters.core.checkpoint.manifest import FileEntry, Manifest
from resume_adapters.core.checkpoint.remove import fenced_off
from resume_adapters.core.checkpoint.writer import WrittenCheckpoint
from resume_adapters.core.log import logger
from resume_adapters.core.ranks import Ranks, run_on_all_ranks
from resume_adapters.core.run_directory.journal import Journal
from resume_adapters.core.run_directory.prune import Pruner
from resume_adapters.core.saving.copied import CopiedSave
from resume_adapters.core.saving.staging import Staging
from resume_adapters.core.storage.groups import StorageGroup
from resume_adapters.core.tiers.memory import MemoryTier
from resume_adapters.errors import ResumeError, SaveFailed

THREAD_NAME = "resume-adapters-commit"
"""How the names of the threads that commit begin."""


@dataclass(frozen=True)
class SaveRequest:
    """A checkpoint that all ranks have written, or copied, and that is to be committed.

    Attributes:
        pending: the checkpoint.
        written: this rank's part of it.
        describe: makes the manifest; see :meth:`PendingCheckpoint.commit`.
        began: when the save began, by ``time.monotonic``.
        copied: what is still to be written; ``None``: nothing.
    """

    pending: PendingCheckpoint
    written: WrittenCheckpoint
    describe: Callable[[tuple[FileEntry, ...]], Manifest]
    began: float
    copied: CopiedSave | None = None


class _Job:
    """Work on a thread of its own, which begins when the job before it has ended.

    The interpreter waits for the thread when a script ends, however it does. In a forked child there is no such thread,
    and nothing to wait for.

    Args:
        work: the work; what it holds is let go before ``then``.
        then: is called with what it returned.
        before: the job before it.
    """

    def __init__(
        self, work: Callable[[], Manifest | None], then: Callable[[Manifest | None], object], before: _Job | None
    ) -> None:
        self.error: BaseException | None = None
        self.is_done = False
        self._failure: tuple[int, str] | None = None
        self._work: Callable[[], Manifest | None] | None = work
        self._then = then
        self._before = before
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME)
        try:
            self._thread.start()
        except RuntimeError:  # the system has no more threads, or the interpreter is about to end
            self._work_off()

    def _run(self) -> None:
        if sys.platform == "linux":  # a thread has a priority of its own there
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        self._work_off()

    def _work_off(self) -> None:
        before, self._before = self._before, None
        if before is not None:
            before.wait()
        work, self._work = self._work, None
        assert work is not None, "it is done once"
        try:
            result = work()
            del work
            self._then(result)
        except BaseException as error:  # raised where somebody waits for it
            self.error = error
            # Not the error itself: its traceback holds the training.
            self._failure = os.getpid(), str(error)
            _FAILED.append(self._failure)
        self.is_done = True

    def wait(self) -> None:
        """Wait until the thread has ended, if there is one."""
        if self._thread.ident is not None:
            self._thread.join()

    def seen(self) -> None:
        """Count what has gone wrong as asked for."""
        if self._failure in _FAILED:
            _FAILED.remove(self._failure)

    def result(self) -> None:
        """Raise what has gone wrong.

        Raises:
            SaveFailed: the thread has ended before its work was done.
        """
        if self.error is not None:
            raise self.error
        if not self.is_done:
            raise SaveFailed("the thread that commits has ended before its work was done: its save is not committed")


_NICE = 10
"""The priority of the threads that commit: behind the training."""

_FAILED: list[tuple[int, str]] = []
"""What has failed and was not asked for yet: the process, and why."""


@atexit.register
def _log_errors() -> None:
    """Log what nobody has asked for until the interpreter ends."""
    for process, reason in _FAILED:
        if process == os.getpid():
            logger.error("The script has ended, and its last save has failed: %s", reason)


class SaveEngine:
    """Commits the checkpoints of one start of a run, one after the other, in the order of submission.

    Every rank has an engine and submits the same work to it in the same order. An error is kept until :meth:`drain`;
    one that nobody has asked for when the interpreter ends is logged.

    Args:
        ranks: the ranks of the run, on a channel that the engine may use from its threads; it closes the channel.
        journal: the history of the run.
        pruner: applies the retention policy after each commit.
        latest: how ``latest`` names the newest checkpoint.
        on_committed: is called after each commit, on the thread, with the checkpoint's name, its manifest and the
            seconds since the save began.
        staging: copies the saves.
        memory: where checkpoints are kept in memory; ``None``: nowhere.

    Attributes:
        last_submitted: step of the newest checkpoint that is committed or being committed; the same on all ranks at
            one place.
        last_committed: step of the newest checkpoint that is committed.
        in_flight: the commits and prunes that :meth:`drain` waits for.
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
        memory: MemoryTier | None = None,
    ) -> None:
        self.last_submitted: int | None = None
        self.last_committed: int | None = None
        self.in_flight: list[_Job] = []
        self._ranks = ranks
        self._journal = journal
        self._pruner = pruner
        self._latest = latest
        self._on_committed = on_committed
        self._staging = staging
        self._memory = memory
        self._process = os.getpid()

    def continue_from(self, step: int) -> None:
        """Count the checkpoint from which the run resumes as the last one committed."""
        self.last_submitted = self.last_committed = step

    def submit(self, request: SaveRequest) -> None:
        """Commit a checkpoint, then publish it and prune the run directory. Every rank calls it."""
        self.last_submitted = request.pending.step
        self._run_later(functools.partial(self._release_after, request, self._commit))

    def submit_to_memory(self, memory: MemoryTier, request: SaveRequest) -> None:
        """Commit a checkpoint in memory, which no ``latest`` names; nothing is pruned after it. Every rank calls it."""
        self._run_later(
            functools.partial(self._release_after, request, functools.partial(self._commit_to_memory, memory))
        )

    def submit_prune(self, group: StorageGroup, best: str | None) -> None:
        """Prune the run directory after the work submitted so far. Every rank calls it.

        Args:
            group: the ranks that share the run directory.
            best: name of the best checkpoint.
        """
        self._run_later(functools.partial(self._prune, group, best))

    def drain(self) -> None:
        """Wait for the work submitted so far, and raise its first error, once. Every rank calls it.

        In a forked child it does nothing.

        Raises:
            SaveFailed: this rank could not commit, publish or prune.
            PeerFailed: another rank could not.
            FencedOff: a later start owns the run directory.
        """
        if self._is_forked:
            return
        for each in self.in_flight:
            each.wait()
        jobs, self.in_flight = self.in_flight, []
        # A save that failed counts until here: what all ranks decide by it must not depend on when each has failed.
        self.last_submitted = self.last_committed
        for each in jobs:
            each.seen()
        for each in jobs:
            each.result()

    def close(self) -> None:
        """Wait for the work submitted so far, then close the channel. Errors stay for :meth:`drain`."""
        if self._is_forked:
            return
        for each in self.in_flight:
            each.wait()
        self._ranks.close()

    @property
    def _is_forked(self) -> bool:
        return os.getpid() != self._process

    def _run_later(self, work: Callable[[], Manifest | None]) -> None:
        self.in_flight.append(_Job(work, self._prepare, self.in_flight[-1] if self.in_flight else None))

    # ---- On the thread

    def _release_after(self, request: SaveRequest, work: Callable[[SaveRequest], Manifest | None]) -> Manifest | None:
        try:
            return work(request)
        finally:
            request.pending.release()

    def _prepare(self, manifest: Manifest | None) -> None:
        """Make what the next save needs, as large as this one was."""
        if manifest is not None:
            own = [entry for entry in manifest.files if entry.rank == self._ranks.rank]
            self._staging.prepare(sum(each.bytes for each in own if Path(each.path).parts[0] != layout.EXTRAS))

    def _write_marker(self, request: SaveRequest) -> Manifest:
        """Write the files that are copied, and commit."""
        copied, pending = request.copied, request.pending

        def write() -> dict[Path, tuple[int, str]]:
            if copied is None:
                return {}
            copied.wait()
            request.written.complete()
            return copied.write(pending.storage, pending.place)

        return pending.commit(self._ranks, request.written.files, request.describe, write)

    def _commit_to_memory(self, memory: MemoryTier, request: SaveRequest) -> Manifest | None:
        """Commit a checkpoint in memory; what goes wrong there is said, and does not end the run."""
        try:
            manifest = self._write_marker(request)
        except ResumeError as error:
            memory.failed(self._ranks, error)
            return None
        memory.committed(self._ranks, request.pending, manifest)
        return manifest

    def _commit(self, request: SaveRequest) -> Manifest:
        pending, manifest = request.pending, self._write_marker(request)
        self.last_committed = pending.step
        seconds = time.monotonic() - request.began
        name, group = pending.path.name, pending.storage_group
        self._on_committed(name, manifest, seconds)

        def announce() -> None:
            pending.announce(self._latest, self._journal.append, manifest, seconds=seconds)

        def publish() -> None:
            if group.is_leader:
                # Every node has committed its part before any of them prunes.
                run_on_all_ranks(group.leaders, announce, f"announce {name}")
                self._pruner.prune(group, manifest.best, just_committed=name)
                pending.set_replaced_aside()  # it is damaged, or pruning would have removed it

        def failed(cause: Exception) -> ResumeError:
            return fenced_off(pending.fence) or SaveFailed(
                f"{name} is committed, but what follows a commit (latest, journal, retention) failed: {cause}. Nothing "
                "is lost: fix permissions or free space, then launch the same command again",
                path=pending.path,
                step=pending.step,
            )

        run_on_all_ranks(self._ranks, publish, f"prune after {name}", failed)
        if self._memory is not None:
            self._memory.copy(self._ranks, pending.path, manifest)
        return manifest

    def _prune(self, group: StorageGroup, best: str | None) -> None:
        pruner = self._pruner

        def failed(cause: Exception) -> ResumeError:
            return fenced_off(pruner.fence) or SaveFailed(
                f"could not prune {pruner.directory}: {cause}. Nothing is lost", path=pruner.directory
            )

        run_on_all_ranks(self._ranks, lambda: pruner.prune(group, best) if group.is_leader else None, "prune", failed)
