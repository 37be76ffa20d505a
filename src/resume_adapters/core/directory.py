"""A run directory on rank zero: made ready, tidied after crashes, and what retention would do to it."""

from __future__ import annotations

from pathlib import Path

from resume_adapters.core import retention
from resume_adapters.core.commit import CONTROL, SUPERSEDED, is_committed, is_pending, marker
from resume_adapters.core.journal import Journal
from resume_adapters.core.manifest import Manifest
from resume_adapters.core.resolve import Foreign, candidates, check_sizes, inspect
from resume_adapters.core.retention import Candidate, Plan, Policy
from resume_adapters.core.storage import Storage, remove_tree
from resume_adapters.errors import CheckpointDamaged, FormatTooNew, RunDirectoryUnusable


def prepare(storage: Storage, directory: Path) -> None:
    """Make the run directory where it is missing, and try that it can be written.

    Raises:
        RunDirectoryUnusable: it is a file, or cannot be written.
    """
    probe = directory / CONTROL / "probe"
    try:
        storage.make_directory(directory / CONTROL)
        storage.write(probe, b"can this be written?\n")
        storage.remove_file(probe)
    except (FileExistsError, NotADirectoryError) as error:
        raise RunDirectoryUnusable(
            f"{directory} is a file, or lies below one; expected a directory for the run's checkpoints", path=directory
        ) from error
    except OSError as error:
        raise RunDirectoryUnusable(
            f"{directory} cannot be written ({error.strerror}); a run that cannot save cannot be resumed: mend its "
            "permissions or free space",
            path=directory,
        ) from error


def set_aside(storage: Storage, path: Path) -> Path:
    """Move a checkpoint out of the way, into ``.resume/set-aside``, and return where it went. It is never deleted."""
    shelf = path.parent / CONTROL / "set-aside"
    storage.make_directory(shelf)
    number = 1
    while (target := shelf / f"{path.name}.{number}").exists() or target.is_symlink():
        number += 1
    storage.replace(path, target)
    return target


def sweep(storage: Storage, directory: Path) -> None:
    """Remove what crashed saves and prunes left uncommitted, and put back what a crashed second save moved."""
    control = directory / CONTROL
    for path in [*candidates(directory), *sorted(control.glob("begin-*"))]:
        if is_pending(path) or path.parent == control:
            remove_tree(storage, path)
    for path in candidates(directory):
        original = path.with_name(path.name.removesuffix(SUPERSEDED))
        if path != original and not original.exists():
            storage.replace(path, original)


def is_checkpoint(path: Path, foreign: Foreign) -> bool:
    """Return whether a directory is a checkpoint of any kind, whole or not."""
    if path.is_symlink() or is_committed(path) or is_pending(path):
        return True
    try:
        return foreign(path) is not None
    except CheckpointDamaged:
        return True


def plan(storage: Storage, directory: Path, keep: Policy, *, now: float, best: str | None = None) -> Plan:
    """Apply a policy to the committed checkpoints of a run directory.

    What is damaged, pending, foreign or written by a later version is neither counted nor removed.

    Args:
        storage: where to look.
        directory: the run directory.
        keep: the policy.
        now: seconds since 1970.
        best: name of the best checkpoint; by default what the newest checkpoint says of it.
    """
    found: list[Candidate] = []
    newest: Manifest | None = None
    for path in candidates(directory):
        if path.is_symlink() or not is_committed(path):
            continue
        try:
            manifest = inspect(storage, path)
            check_sizes(path, manifest)
        except (CheckpointDamaged, FormatTooNew):
            continue
        # Candidates come with the newer save of a step first, so it is known by now whether that one is whole.
        original = path.name.removesuffix(SUPERSEDED)
        superseded = original != path.name and any(candidate.name == original for candidate in found)
        found.append(Candidate(path.name, manifest.step, manifest.written, manifest.metrics, superseded))
        newest = newest or manifest
    current = [candidate for candidate in found if not candidate.superseded]
    anchor = max(current, key=lambda candidate: candidate.step).name if current else None
    best = best or (newest.best if newest else None)
    return retention.plan(found, keep, now=now, anchor=anchor, best=best)


def prune(storage: Storage, directory: Path, plan: Plan, journal: Journal) -> None:
    """Remove what a plan removes: the manifest first, so that a half-removed checkpoint is none."""
    for name, reason in plan.remove.items():
        path = directory / name
        storage.remove_file(marker(path))
        storage.sync(marker(path).parent)
        remove_tree(storage, path)
        journal.note("prune", checkpoint=name, reason=reason)
