"""Delete, supersede and restore checkpoints. No other module deletes a checkpoint."""

from __future__ import annotations

from pathlib import Path

from resume_adapters.core.checkpoint import layout
from resume_adapters.core.checkpoint.layout import CONTROL, is_committed, superseded_path
from resume_adapters.core.storage.base import Storage, is_present, remove_tree


def delete(storage: Storage, checkpoint: Path) -> None:
    """Remove a checkpoint: first move it out of the run directory as a whole, then remove it file by file.

    If this is interrupted, the next start removes the rest.
    """
    if layout.has_sidecar(storage, checkpoint) and is_committed(storage, checkpoint):
        # It takes two renames to move a file and its sidecar, so the checkpoint becomes pending first.
        storage.replace(layout.manifest_path(storage, checkpoint), layout.pending_path(storage, checkpoint))
        storage.sync(layout.sidecar_dir(checkpoint))
    control = checkpoint.parent / CONTROL
    moves = {path: control / f"remove-{path.name}" for path in layout.root_paths(storage, checkpoint)}
    for path, target in moves.items():
        if is_present(storage, target):
            remove_tree(storage, target)
        storage.replace(path, target)
    storage.sync(control)
    storage.sync(checkpoint.parent)
    for target in moves.values():
        remove_tree(storage, target)


def supersede(storage: Storage, checkpoint: Path) -> None:
    """Rename a committed checkpoint so that its name can be saved again; it stays valid."""
    has_sidecar = layout.has_sidecar(storage, checkpoint)
    older = superseded_path(checkpoint)
    storage.replace(checkpoint, older)
    if has_sidecar:
        storage.replace(layout.sidecar_dir(checkpoint), layout.sidecar_dir(older))


def restore_superseded(storage: Storage, checkpoint: Path) -> None:
    """Restore a superseded checkpoint, also after a crash between the two renames."""
    older = superseded_path(checkpoint)
    if layout.has_sidecar(storage, older):  # first, so that an interruption looks like one of supersede()
        storage.replace(layout.sidecar_dir(older), layout.sidecar_dir(checkpoint))
    storage.replace(older, checkpoint)
