"""Checkpoints deleted, superseded and restored. This module is the only one that deletes a checkpoint."""

from __future__ import annotations

from pathlib import Path

from resume_adapters.core.checkpoint import layout
from resume_adapters.core.checkpoint.layout import CONTROL, is_committed, superseded_path
from resume_adapters.core.storage.base import Storage, remove_tree


def delete(storage: Storage, checkpoint: Path) -> None:
    """Remove a checkpoint: out of the run directory at once, manifest and all, then file by file.

    Where it is cut short, the next start removes the rest.
    """
    if layout.has_sidecar(checkpoint) and is_committed(checkpoint):
        storage.replace(layout.manifest_path(checkpoint), layout.pending_path(checkpoint))  # from here on it is none
        storage.sync(layout.sidecar_dir(checkpoint))
    control = checkpoint.parent / CONTROL
    gone = [control / f"remove-{path.name}" for path in layout.root_paths(checkpoint)]
    for path, away in zip(layout.root_paths(checkpoint), gone, strict=True):
        if away.exists() or away.is_symlink():
            remove_tree(storage, away)
        storage.replace(path, away)
    storage.sync(control)
    storage.sync(checkpoint.parent)
    for away in gone:
        remove_tree(storage, away)


def supersede(storage: Storage, checkpoint: Path) -> None:
    """Give a committed checkpoint's name free; it stays valid, under another name."""
    own = layout.has_sidecar(checkpoint)
    older = superseded_path(checkpoint)
    storage.replace(checkpoint, older)
    if own:
        storage.replace(layout.sidecar_dir(checkpoint), layout.sidecar_dir(older))


def restore_superseded(storage: Storage, checkpoint: Path) -> None:
    """Give a checkpoint that stepped aside its name again; also one that was cut short half-way."""
    older = superseded_path(checkpoint)
    if layout.has_sidecar(older):  # first, so that half-way looks as it does half-way aside
        storage.replace(layout.sidecar_dir(older), layout.sidecar_dir(checkpoint))
    storage.replace(older, checkpoint)
