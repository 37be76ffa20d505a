"""Maintenance of a run directory, by its leader rank."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from resume_adapters.core.checkpoint import layout
from resume_adapters.core.checkpoint.catalog import candidates
from resume_adapters.core.checkpoint.layout import CONTROL, LATEST, is_committed, is_pending
from resume_adapters.core.checkpoint.remove import delete, restore_superseded
from resume_adapters.core.checkpoint.validity import ForeignDetector, foreign_step
from resume_adapters.core.storage.base import Storage, remove_tree
from resume_adapters.errors import CheckpointDamaged, RunDirectoryUnusable


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
    return {name: target if name == path else layout.sidecar_dir(target) for name in layout.root_paths(path)}


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
            delete(storage, path)
        elif is_committed(path) and layout.pending_path(path).exists():
            storage.remove_file(layout.pending_path(path))  # the kill came right after the commit
    for path in [*sorted(control.glob("begin-*")), *sorted(control.glob("remove-*"))]:
        remove_tree(storage, path)
    returned = {}
    for path in candidates(directory):
        original = layout.original_path(path)
        if layout.is_superseded(original):
            restore_superseded(storage, original)
            returned[path] = original
    return returned


def is_checkpoint(path: Path, foreign: ForeignDetector) -> bool:
    """Return whether a directory is a checkpoint of any kind, whole or not."""
    if is_committed(path) or is_pending(path):
        return True
    try:
        return foreign_step(path, foreign) is not None
    except CheckpointDamaged:
        return True
