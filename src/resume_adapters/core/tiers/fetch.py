"""Bring a checkpoint from a tier to the run directory, and let it be the newest one there."""

from __future__ import annotations

import functools
from pathlib import Path

from resume_adapters.core.checkpoint import layout
from resume_adapters.core.checkpoint.commit import PendingCheckpoint
from resume_adapters.core.checkpoint.latest import Pointer
from resume_adapters.core.checkpoint.layout import superseded_path
from resume_adapters.core.checkpoint.manifest import Manifest
from resume_adapters.core.checkpoint.remove import Fence
from resume_adapters.core.ranks import Ranks
from resume_adapters.core.run_directory.journal import Journal
from resume_adapters.core.run_directory.upkeep import set_aside
from resume_adapters.core.storage.base import Storage
from resume_adapters.core.storage.groups import StorageGroup, shared_by_all
from resume_adapters.core.tiers.copying import write_copy
from resume_adapters.core.tiers.tier import Tier, TierCheckpoint, is_one_file


class Fetch:
    """Brings checkpoints to one run directory.

    Args:
        storage: the file operations.
        ranks: those that share the run directory; all of them call :meth:`bring`.
        group: the same ranks, by their numbers in the run.
        directory: the run directory.
        fence: raises if another start owns the run directory.
        journal: gets an entry, as for a save.
        latest: how ``latest`` names the newest checkpoint.
    """

    def __init__(
        self,
        storage: Storage,
        ranks: Ranks,
        group: StorageGroup,
        directory: Path,
        fence: Fence,
        journal: Journal,
        latest: Pointer,
    ) -> None:
        self._storage = storage
        self._ranks = ranks
        self._group = group
        self._directory = directory
        self._fence = fence
        self._journal = journal
        self._latest = latest

    def bring(self, tier: Tier, found: TierCheckpoint) -> None:
        """Fetch a checkpoint and commit it in the run directory. All ranks that share the directory call it.

        A checkpoint that has its name there is set aside.

        Raises:
            CheckpointDamaged: on all ranks: a file on the tier is not what the manifest says, and nothing is committed.
            TierUnavailable: the tier does not answer.
            SaveFailed: a file could not be written.
        """
        manifest, path = found.manifest, self._directory / found.name
        pending = PendingCheckpoint(
            self._storage,
            self._ranks,
            path,
            manifest.step,
            self._fence,
            lambda away: set_aside(self._storage, away, self._fence),
            is_file=is_one_file(found.name, manifest),
            storage_group=shared_by_all(self._ranks),
        )
        mine = [entry for entry in manifest.files if self._group.owner_in_group(entry.rank) == self._group.rank]
        read = functools.partial(tier.read, found)
        try:
            write_copy(pending, manifest, mine, read, f"{tier.label}/{found.place}")
            if self._ranks.rank == 0:
                self._publish(pending, tier, manifest)
        finally:
            pending.release()
        self._ranks.barrier()

    def _publish(self, pending: PendingCheckpoint, tier: Tier, manifest: Manifest) -> None:
        pending.publish(self._latest)
        self._journal.append(
            "commit",
            step=manifest.step,
            checkpoint=pending.path.name,
            reason=manifest.reason,
            cursor=manifest.cursor,
            fetched_from=tier.label,
        )
        pending.complete()
        replaced = superseded_path(pending.path)
        if layout.root_paths(self._storage, replaced):
            set_aside(self._storage, replaced, self._fence)
