"""Retention applied to a run directory."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from resume_adapters.core.checkpoint import layout, retention
from resume_adapters.core.checkpoint.catalog import candidates, newest_first
from resume_adapters.core.checkpoint.layout import SUPERSEDED, is_committed
from resume_adapters.core.checkpoint.manifest import Manifest
from resume_adapters.core.checkpoint.remove import Fence, delete
from resume_adapters.core.checkpoint.retention import Candidate, Plan, Policy
from resume_adapters.core.checkpoint.validity import check_digests, check_sizes, read_manifest
from resume_adapters.core.ranks import SINGLE_PROCESS, Ranks, run_on_all_ranks
from resume_adapters.core.run_directory.journal import Journal
from resume_adapters.core.storage.base import Storage
from resume_adapters.core.storage.groups import StorageGroup
from resume_adapters.errors import CheckpointDamaged, FormatTooNew


def plan_prune(
    storage: Storage,
    directory: Path,
    keep: Policy,
    *,
    now: float,
    best: str | None = None,
    just_committed: str | None = None,
    leaders: Ranks = SINGLE_PROCESS,
) -> Plan:
    """Apply a policy to the committed checkpoints of a run directory, or of all run directories of a run.

    Checkpoints that are damaged, pending, foreign or of a later version are neither counted nor removed. The anchor is
    read whole before anything is removed because of it.

    Args:
        storage: the file operations.
        directory: the run directory.
        keep: the policy.
        now: seconds since 1970.
        best: name of the best checkpoint; by default that of the newest manifest.
        just_committed: name of a checkpoint that this process has just committed; it is not read again.
        leaders: the leaders of the run's directories; all call this and get the same plan.
    """
    of_all = run_on_all_ranks(leaders, lambda: _whole(storage, directory), "list the checkpoints")
    manifests, partial = _merge(of_all)

    def agrees(name: str) -> bool:
        manifest = of_all[leaders.rank][name]
        return manifest is not None and _agrees(storage, directory / name, manifest)

    anchor = None
    for name in list(manifests):
        here = functools.partial(agrees, name)
        if name not in partial and (name == just_committed or all(run_on_all_ranks(leaders, here, f"read {name}"))):
            anchor = name
            break
        del manifests[name]
    found = [
        Candidate(
            name,
            manifest.step,
            manifest.written,
            manifest.metrics,
            _superseded_name(name) in manifests,
            name in partial,
        )
        for name, manifest in manifests.items()
    ]
    best = best or (manifests[anchor].best if anchor else None)
    if best is not None and best not in manifests:
        best += SUPERSEDED
    return retention.plan_retention(found, keep, now=leaders.gather(now)[0], anchor=anchor, best=best)


def _whole(storage: Storage, directory: Path) -> dict[str, Manifest | None]:
    """Return the manifests of the committed checkpoints; ``None`` for one whose files do not have their sizes."""
    found: dict[str, Manifest | None] = {}
    for path in candidates(storage, directory):
        if storage.is_link(path) or not is_committed(storage, path):
            continue
        found[path.name] = None
        with contextlib.suppress(CheckpointDamaged, FormatTooNew):
            manifest = read_manifest(storage, path)
            check_sizes(storage, path, manifest)
            found[path.name] = manifest
    return found


def _merge(of_all: list[dict[str, Manifest | None]]) -> tuple[dict[str, Manifest], set[str]]:
    """Merge the manifests of several run directories.

    Returns:
        The manifests of checkpoints that are damaged in none of them, in the order in which a resume tries them, and
        the names of those that are missing in some.
    """
    damaged = {name for held in of_all for name, manifest in held.items() if manifest is None}
    found = {
        name: manifest
        for held in reversed(of_all)
        for name, manifest in held.items()
        if manifest is not None and name not in damaged
    }
    partial = {name for name in found if any(name not in held for held in of_all)}
    order = sorted(found, key=lambda name: newest_first(name, found[name].step, found[name].written))
    return {name: found[name] for name in order}, partial


def _agrees(storage: Storage, path: Path, manifest: Manifest) -> bool:
    try:
        for _ in check_digests(storage, path, manifest.files):
            pass
    except CheckpointDamaged:
        return False
    return True


def _superseded_name(name: str) -> str | None:
    return name.removesuffix(SUPERSEDED) if name.endswith(SUPERSEDED) else None


def prune(storage: Storage, directory: Path, plan: Plan, journal: Journal, fence: Fence) -> None:
    """Remove the checkpoints that a plan removes. If this is interrupted, the next start removes the rest.

    Raises:
        FencedOff: a later start owns the run directory.
    """
    for name, reason in plan.remove.items():
        if not layout.root_paths(storage, directory / name):
            continue  # it is in another directory only
        delete(storage, directory / name, fence)
        journal.append("prune", checkpoint=name, reason=reason)


Observed: TypeAlias = Callable[[Mapping[str, str]], contextlib.AbstractContextManager[Any]]


class Pruner:
    """Applies the retention policy of a run to its directory.

    Args:
        storage: the file operations.
        directory: the run directory.
        journal: gets an entry for each checkpoint that is removed.
        keep: the policy.
        fence: raises where a later start owns the run directory.
        clock: returns seconds since 1970.
        observed: returns the context in which the checkpoints of a plan are removed, by name and reason.
    """

    def __init__(
        self,
        storage: Storage,
        directory: Path,
        journal: Journal,
        *,
        keep: Policy,
        fence: Fence,
        clock: Callable[[], float],
        observed: Observed | None = None,
    ) -> None:
        self.directory = directory
        self.keep = keep
        self._storage = storage
        self._journal = journal
        self.fence = fence
        self._clock = clock
        self._observed: Observed = contextlib.nullcontext if observed is None else observed

    def prune(self, group: StorageGroup, best: str | None, just_committed: str | None = None) -> Plan:
        """Remove the checkpoints that the policy does not keep. The leaders of all run directories call it together.

        Args:
            group: the ranks that share the run directory.
            best: name of the best checkpoint.
            just_committed: name of the checkpoint that was just committed.

        Returns:
            What is kept and what was removed, with reasons.
        """
        run_on_all_ranks(group.leaders, self.fence, "prune")
        plan = plan_prune(
            self._storage,
            self.directory,
            self.keep,
            now=self._clock(),
            best=best,
            just_committed=just_committed,
            leaders=group.leaders,
        )
        with self._observed(plan.remove):
            prune(self._storage, self.directory, plan, self._journal, self.fence)
        return plan
