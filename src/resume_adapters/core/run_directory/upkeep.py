"""Maintenance of a run directory, by its leader rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from resume_adapters.core.checkpoint import layout
from resume_adapters.core.checkpoint.catalog import candidates
from resume_adapters.core.checkpoint.layout import CONTROL, LATEST, CheckpointState, must_be_restored, state_of
from resume_adapters.core.checkpoint.remove import delete, restore_superseded
from resume_adapters.core.checkpoint.validity import ForeignDetector, foreign_step
from resume_adapters.core.storage.base import Storage, is_present, remove_tree
from resume_adapters.errors import CheckpointDamaged, RunDirectoryUnusable


def prepare(storage: Storage, directory: Path) -> None:
    """Create the run directory if it is missing, and check that it can be written.

    Raises:
        RunDirectoryUnusable: it is a file, or cannot be written.
    """
    probe = directory / CONTROL / "probe"
    with usable(directory):
        storage.make_directory(directory / CONTROL)
        storage.write(probe, b"can this be written?\n")
        storage.remove_file(probe)
        require_link(storage, directory / LATEST)


@contextlib.contextmanager
def usable(directory: Path) -> Iterator[None]:
    """Translate OSError into RunDirectoryUnusable.

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
            "fix its permissions or free space",
            path=directory,
        ) from error


def require_link(storage: Storage, latest: Path) -> None:
    """Check that no directory has the name of the link to the newest checkpoint.

    Raises:
        RunDirectoryUnusable: a directory has that name.
    """
    if storage.is_directory(latest) and not storage.is_link(latest):
        raise RunDirectoryUnusable(
            f"{latest} is a directory; expected that name to be free for the link to the newest checkpoint: rename it",
            path=latest,
        )


def set_aside(storage: Storage, path: Path) -> Path:
    """Move a checkpoint into ``.resume/set-aside``, where it is never deleted; return its path there."""
    shelf = path.parent / CONTROL / "set-aside"
    storage.make_directory(shelf)
    number = 1
    # After a crash between the two renames of a checkpoint, the second half gets the number of the first.
    while any(is_present(storage, away) for away in _moves(storage, path, shelf / f"{path.name}.{number}").values()):
        number += 1
    target = shelf / f"{path.name}.{number}"
    for source, away in _moves(storage, path, target).items():
        storage.replace(source, away)
    return target


def _moves(storage: Storage, path: Path, target: Path) -> dict[Path, Path]:
    return {name: target if name == path else layout.sidecar_dir(target) for name in layout.root_paths(storage, path)}


def sweep(storage: Storage, directory: Path) -> dict[Path, Path]:
    """Remove the leftovers of crashed saves and prunes, and restore what a crashed second save superseded.

    Returns:
        The new path of each checkpoint that was restored.
    """
    for path in candidates(storage, directory):
        if storage.is_link(path):
            continue
        state = state_of(storage, path)
        if state is CheckpointState.PENDING:
            delete(storage, path)
        elif state is CheckpointState.COMMITTED and storage.exists(layout.pending_path(storage, path)):
            storage.remove_file(layout.pending_path(storage, path))  # killed right after the commit
    control = directory / CONTROL
    for entry in sorted(storage.entries(control)):
        if entry.name.startswith(("begin-", "remove-")):
            remove_tree(storage, control / entry.name)
    restored = {}
    for path in candidates(storage, directory):
        original = layout.original_path(path)
        if must_be_restored(storage, original):
            restore_superseded(storage, original)
            restored[path] = original
    return restored


def is_checkpoint(storage: Storage, path: Path, foreign: ForeignDetector) -> bool:
    """Return whether a path is a checkpoint of any state, valid or not."""
    if state_of(storage, path) in (CheckpointState.COMMITTED, CheckpointState.PENDING):
        return True
    try:
        return foreign_step(storage, path, foreign) is not None
    except CheckpointDamaged:
        return True
