"""Delete, supersede, restore and set aside checkpoints, as the start that owns a run directory.

No other module deletes one. Each operation looks at the fence before it moves something, and again after. A start that
is frozen in between moves what a later start has made since; with the second look it finds that out and undoes the
move, before anything is removed.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

from resume_adapters.core.checkpoint import layout
from resume_adapters.core.checkpoint.layout import CONTROL, is_committed, superseded_path
from resume_adapters.core.storage.base import Storage, is_present, remove_tree, unless_held
from resume_adapters.errors import FencedOff

Fence = Callable[[], None]
"""Raises :class:`FencedOff` if a later start owns the run directory."""

BEGUN = "begin-"
"""How the directories in ``.resume`` begin in which a start writes a checkpoint before it has its name."""

REMOVED = "remove-"
"""How the names in ``.resume`` begin that wait for their removal."""


def fenced_off(fence: Fence) -> FencedOff | None:
    """Return what a fence raises; ``None`` if this start owns the run directory, or the disk cannot be read.

    Look at it before an error is worded: whatever the system said, this is why.
    """
    try:
        fence()
    except FencedOff as refused:
        return refused
    except OSError:
        return None
    return None


def move(storage: Storage, moves: Mapping[Path, Path], fence: Fence) -> None:
    """Rename, in this order; undo it all if a later start has taken the run directory over meanwhile.

    After a loss of power, what was renamed first is renamed if anything is.

    Raises:
        FencedOff: a later start owns the run directory.
        FileNotFoundError: something is not there, and the rest is moved.
    """
    fence()
    missing = None
    for number, (source, target) in enumerate(moves.items()):
        if number:
            _sync(storage, source.parent, target.parent)
        try:
            storage.replace(source, target)
        except FileNotFoundError as error:
            missing = error
    try:
        fence()
    except FencedOff:
        for source, target in reversed(list(moves.items())):
            if is_present(storage, target) and not is_present(storage, source):
                storage.replace(target, source)
        raise
    if missing is not None:
        raise missing


def delete(storage: Storage, checkpoint: Path, fence: Fence) -> OSError | None:
    """Remove a checkpoint: first move it out of the run directory as a whole, then remove it file by file.

    If this is interrupted, the next start removes the rest.

    Returns:
        The first error of what cannot be removed: another user's files, or one that is in use. ``None``: it is gone.

    Raises:
        FencedOff: a later start owns the run directory.
    """
    moves = {path: _condemned(checkpoint.parent, path.name) for path in layout.root_paths(storage, checkpoint)}
    if layout.has_sidecar(storage, checkpoint) and is_committed(storage, checkpoint):
        # It takes two renames to move a file and its sidecar, so the checkpoint becomes pending first.
        marker = layout.manifest_path(storage, checkpoint)
        held = unless_held(functools.partial(move, storage, {marker: marker.with_name(layout.PENDING)}, fence))
        if held is not None:
            return held
        storage.sync(marker.parent)
    return _remove(storage, checkpoint.parent, moves, fence)


def delete_leftover(storage: Storage, leftover: Path, fence: Fence) -> OSError | None:
    """Remove what a start that is no more has left in ``.resume``.

    Returns:
        The first error of what cannot be removed. ``None``: it is gone.

    Raises:
        FencedOff: a later start owns the run directory.
    """
    if leftover.name.startswith(REMOVED):
        fence()
        return remove_tree(storage, leftover)  # nobody uses it again under that name
    directory = leftover.parent.parent
    return _remove(storage, directory, {leftover: _condemned(directory, leftover.name)}, fence)


def delete_begun(storage: Storage, begun: Path) -> None:
    """Remove what a save has written before it had its name; no other start uses that directory.

    What cannot be removed is left to the next start.
    """
    remove_tree(storage, begun)


def delete_all(storage: Storage, directory: Path, fence: Fence) -> None:
    """Remove a directory of checkpoints that are all held elsewhere.

    Raises:
        FencedOff: a later start owns the run.
    """
    fence()
    remove_tree(storage, directory)


def _condemned(run_directory: Path, name: str) -> Path:
    """Return where something waits for its removal; two starts that remove the same do not meet there."""
    return run_directory / CONTROL / f"{REMOVED}{uuid.uuid4().hex[:8]}-{name}"


def _remove(storage: Storage, run_directory: Path, moves: Mapping[Path, Path], fence: Fence) -> OSError | None:
    held = unless_held(functools.partial(move, storage, moves, fence))
    if held is not None:
        return held
    _sync(storage, run_directory, run_directory / CONTROL)
    left = [remove_tree(storage, target) for target in moves.values()]
    return next((error for error in left if error is not None), None)


def _sync(storage: Storage, *directories: Path) -> None:
    for directory in sorted(set(directories)):
        storage.sync(directory)


def set_aside(storage: Storage, path: Path, fence: Fence) -> Path:
    """Move a checkpoint into ``.resume/set-aside``, where it is never deleted; return its path there.

    Raises:
        FencedOff: a later start owns the run directory.
    """
    shelf = path.parent / CONTROL / "set-aside"
    storage.make_directory(shelf)
    number = 1
    # After a crash between the two renames of a checkpoint, the second half gets the number of the first.
    while any(is_present(storage, away) for away in _moves(storage, path, shelf / f"{path.name}.{number}").values()):
        number += 1
    target = shelf / f"{path.name}.{number}"
    move(storage, _moves(storage, path, target), fence)
    return target


def _moves(storage: Storage, path: Path, target: Path) -> dict[Path, Path]:
    return {name: target if name == path else layout.sidecar_dir(target) for name in layout.root_paths(storage, path)}


def supersede(storage: Storage, checkpoint: Path, fence: Fence) -> None:
    """Rename a committed checkpoint so that its name can be saved again; it stays valid.

    Raises:
        FencedOff: a later start owns the run directory.
    """
    older = superseded_path(checkpoint)
    moves = {checkpoint: older}
    if layout.has_sidecar(storage, checkpoint):
        moves[layout.sidecar_dir(checkpoint)] = layout.sidecar_dir(older)
    move(storage, moves, fence)
    storage.sync(checkpoint.parent)


def restore_superseded(storage: Storage, checkpoint: Path, fence: Fence) -> None:
    """Restore a superseded checkpoint, also after a crash between the two renames.

    Raises:
        FencedOff: a later start owns the run directory.
    """
    older = superseded_path(checkpoint)
    moves = {}
    if layout.has_sidecar(storage, older):  # first, so that an interruption looks like one of supersede()
        moves[layout.sidecar_dir(older)] = layout.sidecar_dir(checkpoint)
    moves[older] = checkpoint
    move(storage, moves, fence)
