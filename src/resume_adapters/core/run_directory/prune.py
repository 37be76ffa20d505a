"""Retention applied to a run directory: what a policy keeps and removes there."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path

from resume_adapters.core.checkpoint import layout, retention
from resume_adapters.core.checkpoint.catalog import candidates, newest_first
from resume_adapters.core.checkpoint.layout import SUPERSEDED, is_committed
from resume_adapters.core.checkpoint.manifest import Manifest
from resume_adapters.core.checkpoint.remove import delete
from resume_adapters.core.checkpoint.retention import Candidate, Plan, Policy
from resume_adapters.core.checkpoint.validity import check_digests, check_sizes, read_manifest
from resume_adapters.core.ranks import SINGLE_PROCESS, Ranks, run_on_all_ranks
from resume_adapters.core.run_directory.journal import Journal
from resume_adapters.core.storage.base import Storage
from resume_adapters.errors import CheckpointDamaged, FormatTooNew


def plan_prune(
    storage: Storage,
    directory: Path,
    keep: Policy,
    *,
    now: float,
    best: str | None = None,
    sealed: str | None = None,
    leaders: Ranks = SINGLE_PROCESS,
) -> Plan:
    """Apply a policy to the committed checkpoints of a run directory; of several directories, to those of all together.

    What is damaged, pending, foreign or written by a later version is neither counted nor removed. The anchor is read
    whole before anything may go because of it.

    Args:
        storage: where to look.
        directory: the run directory.
        keep: the policy.
        now: seconds since 1970.
        best: name of the best checkpoint; by default what the newest checkpoint says of it.
        sealed: name of a checkpoint that this process has just committed: it need not be read again.
        leaders: those who lead the run's directories, all of which call this and are answered alike.
    """
    of_all = run_on_all_ranks(leaders, lambda: _whole(storage, directory), "list the checkpoints")
    manifests, partial = _merge(of_all)

    def agrees(name: str) -> bool:
        manifest = of_all[leaders.rank][name]
        return manifest is not None and _agrees(storage, directory / name, manifest)

    anchor = None
    for name in list(manifests):
        here = functools.partial(agrees, name)
        if name not in partial and (name == sealed or all(run_on_all_ranks(leaders, here, f"read {name}"))):
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
    """Return the manifests of the committed checkpoints; ``None`` where not all files have their sizes."""
    found: dict[str, Manifest | None] = {}
    for path in candidates(directory):
        if path.is_symlink() or not is_committed(path):
            continue
        found[path.name] = None
        with contextlib.suppress(CheckpointDamaged, FormatTooNew):
            manifest = read_manifest(storage, path)
            check_sizes(path, manifest)
            found[path.name] = manifest
    return found


def _merge(of_all: list[dict[str, Manifest | None]]) -> tuple[dict[str, Manifest], set[str]]:
    """Join what the directories hold.

    Returns:
        The manifests of what is damaged nowhere, in the order in which a resume considers them, and the names of those
        that are not in every directory.
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


def prune(storage: Storage, directory: Path, plan: Plan, journal: Journal) -> None:
    """Remove what a plan removes. Where it is cut short, the next start removes the rest."""
    for name, reason in plan.remove.items():
        if not layout.root_paths(directory / name):
            continue  # another directory has it alone
        delete(storage, directory / name)
        journal.append("prune", checkpoint=name, reason=reason)
