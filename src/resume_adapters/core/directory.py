"""A run directory in the hands of the rank that leads it: made ready, tidied after crashes, pruned."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path

from resume_adapters.core import place, retention
from resume_adapters.core.commit import discard, put_back
from resume_adapters.core.journal import Journal
from resume_adapters.core.listing import (
    Foreign,
    candidates,
    check_digests,
    check_sizes,
    inspect,
    newest_first,
    whole_foreign,
)
from resume_adapters.core.manifest import Manifest
from resume_adapters.core.place import CONTROL, LATEST, SUPERSEDED, is_committed, is_pending
from resume_adapters.core.ranks import ALONE, Ranks, everywhere
from resume_adapters.core.retention import Candidate, Plan, Policy
from resume_adapters.core.storage import Storage, remove_tree
from resume_adapters.errors import CheckpointDamaged, FormatTooNew, RunDirectoryUnusable


def prepare(storage: Storage, directory: Path) -> None:
    """Make the run directory where it is missing, and try that it can be written.

    Raises:
        RunDirectoryUnusable: it is a file, or cannot be written.
    """
    probe = directory / CONTROL / "probe"
    with usable(directory):
        storage.make_directory(directory / CONTROL)
        storage.write(probe, b"can this be written?\n")
        storage.remove_file(probe)
        require_link(directory / LATEST)


@contextlib.contextmanager
def usable(directory: Path) -> Iterator[None]:
    """Say of an error of the system what it means for the run directory.

    Raises:
        RunDirectoryUnusable: it is a file, or cannot be written.
    """
    try:
        yield
    except (FileExistsError, NotADirectoryError) as error:
        raise RunDirectoryUnusable(
            f"{directory} is a file, or lies below one; expected a directory for the run's checkpoints", path=directory
        ) from error
    except OSError as error:
        raise RunDirectoryUnusable(
            f"{directory} cannot be written ({error.strerror or error}); a run that cannot save cannot be resumed: "
            "mend its permissions or free space",
            path=directory,
        ) from error


def require_link(latest: Path) -> None:
    """Check that the name of the link to the newest checkpoint is free for it.

    Raises:
        RunDirectoryUnusable: a directory has that name.
    """
    if latest.is_dir() and not latest.is_symlink():
        raise RunDirectoryUnusable(
            f"{latest} is a directory; expected that name to be free for the link to the newest checkpoint: rename it",
            path=latest,
        )


def set_aside(storage: Storage, path: Path) -> Path:
    """Move a checkpoint out of the way, into ``.resume/set-aside``, and return where it went. It is never deleted."""
    shelf = path.parent / CONTROL / "set-aside"
    storage.make_directory(shelf)
    number = 1
    # Of a checkpoint that was half moved when a crash came, the other half gets the same number.
    while any(os.path.lexists(away) for away in _moves(path, shelf / f"{path.name}.{number}").values()):
        number += 1
    target = shelf / f"{path.name}.{number}"
    for source, away in _moves(path, target).items():
        storage.replace(source, away)
    return target


def _moves(path: Path, target: Path) -> dict[Path, Path]:
    return {name: target if name == path else place.beside(target) for name in place.names(path)}


def sweep(storage: Storage, directory: Path) -> dict[Path, Path]:
    """Remove what crashed saves and prunes left, and put back what a crashed second save moved.

    Returns:
        Where each checkpoint that was put back is now.
    """
    control = directory / CONTROL
    for path in candidates(directory):
        if path.is_symlink():
            continue
        if is_pending(path):
            discard(storage, path)
        elif is_committed(path) and place.pending_marker(path).exists():
            storage.remove_file(place.pending_marker(path))  # the kill came right after the commit
    for path in [*sorted(control.glob("begin-*")), *sorted(control.glob("remove-*"))]:
        remove_tree(storage, path)
    returned = {}
    for path in candidates(directory):
        original = place.original(path)
        if place.has_stepped_aside(original):
            put_back(storage, original)
            returned[path] = original
    return returned


def is_checkpoint(path: Path, foreign: Foreign) -> bool:
    """Return whether a directory is a checkpoint of any kind, whole or not."""
    if is_committed(path) or is_pending(path):
        return True
    try:
        return whole_foreign(path, foreign) is not None
    except CheckpointDamaged:
        return True


def plan(
    storage: Storage,
    directory: Path,
    keep: Policy,
    *,
    now: float,
    best: str | None = None,
    sealed: str | None = None,
    leaders: Ranks = ALONE,
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
    of_all = everywhere(leaders, lambda: _whole(storage, directory), "list the checkpoints")
    manifests, partial = _together(of_all)

    def agrees(name: str) -> bool:
        manifest = of_all[leaders.rank][name]
        return manifest is not None and _agrees(storage, directory / name, manifest)

    anchor = None
    for name in list(manifests):
        here = functools.partial(agrees, name)
        if name not in partial and (name == sealed or all(everywhere(leaders, here, f"read {name}"))):
            anchor = name
            break
        del manifests[name]
    found = [
        Candidate(
            name, manifest.step, manifest.written, manifest.metrics, _original(name) in manifests, name in partial
        )
        for name, manifest in manifests.items()
    ]
    best = best or (manifests[anchor].best if anchor else None)
    if best is not None and best not in manifests:
        best += SUPERSEDED
    return retention.plan(found, keep, now=leaders.gather(now)[0], anchor=anchor, best=best)


def _whole(storage: Storage, directory: Path) -> dict[str, Manifest | None]:
    """Return the manifests of the committed checkpoints; ``None`` where not all files have their sizes."""
    found: dict[str, Manifest | None] = {}
    for path in candidates(directory):
        if path.is_symlink() or not is_committed(path):
            continue
        found[path.name] = None
        with contextlib.suppress(CheckpointDamaged, FormatTooNew):
            manifest = inspect(storage, path)
            check_sizes(path, manifest)
            found[path.name] = manifest
    return found


def _together(of_all: list[dict[str, Manifest | None]]) -> tuple[dict[str, Manifest], set[str]]:
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


def _original(name: str) -> str | None:
    return name.removesuffix(SUPERSEDED) if name.endswith(SUPERSEDED) else None


def prune(storage: Storage, directory: Path, plan: Plan, journal: Journal) -> None:
    """Remove what a plan removes. Where it is cut short, the next start removes the rest."""
    for name, reason in plan.remove.items():
        if not place.names(directory / name):
            continue  # another directory has it alone
        discard(storage, directory / name)
        journal.note("prune", checkpoint=name, reason=reason)
