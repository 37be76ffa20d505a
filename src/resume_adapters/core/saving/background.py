"""Commits in the background, one after the other, on a thread and a channel of their own, with what follows each."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from resume_adapters.core.checkpoint import layout
from resume_adapters.core.checkpoint.commit import PendingCheckpoint
from resume_adapters.core.checkpoint.layout import superseded_path
from resume_adapters.core.checkpoint.manifest import FileEntry, Manifest
from resume_adapters.core.checkpoint.retention import Plan, Policy
from resume_adapters.core.ranks import Ranks, run_on_all_ranks
from resume_adapters.core.run_directory.journal import Journal
from resume_adapters.core.run_directory.prune import plan_prune, prune
from resume_adapters.core.run_directory.upkeep import set_aside
from resume_adapters.core.storage.base import Pointer, Storage
from resume_adapters.core.storage.groups import StorageGroup
from resume_adapters.errors import SaveFailed


class ThreadSaveEngine:
    """Commits what one start of a run has written, and prunes.

    Args:
        storage: the file operations.
        ranks: the ranks of the run, with a channel of their own.
        run_directory: where the run's checkpoints live.
        journal: the history of the run.
        keep: the retention policy.
        latest: how ``latest`` names the newest checkpoint.
        fence: raises where a later start owns the run directory.
        tell: is told, after each commit, the seconds since its save began.
        clock: returns seconds since 1970.

    Attributes:
        keep: the retention policy.
        last: step of the newest checkpoint that is committed or being committed.
        committed: step of the newest one that is committed.
        under_way: the commits and prunes that nobody has waited for.
    """

    def __init__(
        self,
        storage: Storage,
        ranks: Ranks,
        run_directory: Path,
        journal: Journal,
        *,
        keep: Policy,
        latest: Pointer,
        fence: Callable[[], None],
        tell: Callable[[float], None],
        clock: Callable[[], float],
    ) -> None:
        self.keep = keep
        self.last: int | None = None
        self.committed: int | None = None
        self.under_way: list[Future[None]] = []
        self._storage = storage
        self._ranks = ranks
        self._directory = run_directory
        self._journal = journal
        self._latest = latest
        self._fence = fence
        self._tell = tell
        self._clock = clock
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="resume-adapters-commit")

    def commit(
        self,
        pending: PendingCheckpoint,
        files: list[tuple[Path, Path]],
        describe: Callable[[tuple[FileEntry, ...]], Manifest],
        began: float,
    ) -> None:
        """Begin to commit a checkpoint, and then to announce it and to prune. Every rank calls it.

        Args:
            pending: the checkpoint, written.
            files: this rank's files, each after its path for the manifest.
            describe: makes the manifest; see :meth:`PendingCheckpoint.commit`.
            began: when the save began, by ``time.monotonic``.
        """
        pending.ranks = self._ranks

        def work() -> None:
            manifest = pending.commit(files, describe)
            self.committed = pending.step
            took = time.monotonic() - began
            self._tell(took)
            run_on_all_ranks(
                self._ranks,
                lambda: self._follow(pending, manifest, took) if pending.sharing.leads else None,
                f"prune after {pending.path.name}",
                failed,
            )

        def failed(cause: Exception) -> SaveFailed:
            return SaveFailed(
                f"{pending.path.name} is committed, but what follows a commit (latest, journal, retention) failed: "
                f"{cause}. Nothing is lost: mend permissions or free space, then launch the same command again",
                path=pending.path,
                step=pending.step,
            )

        self.last = pending.step
        self._submit(work)

    def _follow(self, pending: PendingCheckpoint, manifest: Manifest, took: float) -> None:
        """Do what follows a commit, on the leaders of run directories: each has committed its own."""

        def announce() -> None:
            pending.announce(self._latest)
            reason, cursor = manifest.reason, manifest.cursor
            self._journal.append("commit", step=pending.step, reason=reason, cursor=cursor, seconds=took)

        run_on_all_ranks(pending.sharing.leaders, announce, f"announce {pending.path.name}")
        self.prune(pending.sharing, manifest.best, sealed=pending.path.name)
        replaced = superseded_path(pending.path)
        if layout.root_paths(replaced):  # damaged, or pruning would have removed it
            set_aside(self._storage, replaced)

    def prune(self, sharing: StorageGroup, best: str | None, sealed: str | None = None) -> Plan:
        """Remove what the policy does not keep. Those who lead run directories call it, together.

        Args:
            sharing: which ranks share the run directory.
            best: name of the best checkpoint.
            sealed: name of the checkpoint that was just committed.
        """
        run_on_all_ranks(sharing.leaders, self._fence, "prune")
        plan = plan_prune(
            self._storage,
            self._directory,
            self.keep,
            now=self._clock(),
            best=best,
            sealed=sealed,
            leaders=sharing.leaders,
        )
        prune(self._storage, self._directory, plan, self._journal)
        return plan

    def prune_later(self, sharing: StorageGroup, best: str | None) -> None:
        """Prune once the commits under way are done. Every rank calls it."""

        def work() -> None:
            run_on_all_ranks(self._ranks, lambda: self.prune(sharing, best) if sharing.leads else None, "prune", failed)

        def failed(cause: Exception) -> SaveFailed:
            return SaveFailed(f"could not prune {self._directory}: {cause}. Nothing is lost", path=self._directory)

        self._submit(work)

    def _submit(self, work: Callable[[], None]) -> None:
        self.under_way.append(self._thread.submit(work))

    def flush(self) -> None:
        """Wait for what is under way, and raise what it raised."""
        under_way, self.under_way = self.under_way, []
        try:
            for each in under_way:
                each.result()
        except BaseException:
            self.last = self.committed
            raise

    def close(self) -> None:
        """End the thread, once what is under way is done."""
        self._thread.shutdown()
