"""Whether a checkpoint is what its manifest says. Reads only."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from resume_adapters.core.checkpoint import layout
from resume_adapters.core.checkpoint.layout import is_committed
from resume_adapters.core.checkpoint.manifest import FileEntry, Manifest, decode_manifest
from resume_adapters.core.storage.base import Storage
from resume_adapters.errors import CheckpointDamaged

ForeignDetector = Callable[[Path], int | None]
"""Asks an adapter about something that this package did not write: the step of a whole checkpoint, ``None`` for what is
none. Raises :class:`CheckpointDamaged` for a checkpoint that is not whole."""


def read_manifest(storage: Storage, path: Path) -> Manifest:
    """Read the manifest of a committed checkpoint.

    Raises:
        CheckpointDamaged: the manifest cannot be read, or the checkpoint is a link that leaves the run directory.
        FormatTooNew: a later version wrote it.
    """
    require_in_run_directory(path)
    try:
        return decode_manifest(storage.read(layout.manifest_path(path)))
    except OSError as error:
        raise CheckpointDamaged(f"manifest.json cannot be read: {error.strerror}", path=path) from error


def require_in_run_directory(path: Path) -> None:
    """Refuse a checkpoint that is a symbolic link to somewhere else.

    Raises:
        CheckpointDamaged: it is one.
    """
    if path.is_symlink() and os.path.dirname(os.path.realpath(path)) != os.path.realpath(path.parent):
        raise CheckpointDamaged(f"is a symbolic link that leaves the run directory ({os.readlink(path)})", path=path)


def is_alias(path: Path) -> bool:
    """Return whether a candidate is no further checkpoint: a link to a committed one of the same run directory."""
    if not path.is_symlink() or not is_committed(path):
        return False
    return os.path.dirname(os.path.realpath(path)) == os.path.realpath(path.parent)


def check_sizes(path: Path, manifest: Manifest) -> None:
    """Check that every file of a manifest is there with its size.

    Raises:
        CheckpointDamaged: naming the first file that is not.
    """
    for entry in manifest.files:
        try:
            size = os.stat(layout.locate(path, entry.path)).st_size
        except OSError as error:
            raise CheckpointDamaged(f"{entry.path} cannot be read: {error.strerror}", path=path) from error
        if size != entry.bytes:
            raise CheckpointDamaged(f"{entry.path} has {size} bytes, its manifest says {entry.bytes}", path=path)


def check_digests(storage: Storage, path: Path, entries: tuple[FileEntry, ...]) -> Iterator[FileEntry]:
    """Read files and compare their digests, yielding each entry that agrees.

    Raises:
        CheckpointDamaged: naming the first file that does not.
    """
    for entry in entries:
        try:
            _, digest = storage.digest(layout.locate(path, entry.path))
        except OSError as error:
            raise CheckpointDamaged(f"{entry.path} cannot be read: {error.strerror}", path=path) from error
        if digest != entry.digest:
            raise CheckpointDamaged(
                f"{entry.path} has the digest {digest}, its manifest says {entry.digest}: its content has changed",
                path=path,
            )
        yield entry


def foreign_step(path: Path, foreign: ForeignDetector) -> int | None:
    """Ask the adapter about what has no manifest: its step, or ``None`` where it is no checkpoint.

    Raises:
        CheckpointDamaged: it is not whole, or has lost its manifest.
    """
    if layout.has_lost_manifest(path):
        missing = layout.manifest_path(path).relative_to(path.parent if layout.has_sidecar(path) else path)
        raise CheckpointDamaged(f"{missing} is missing, though the rest of the checkpoint is there", path=path)
    return foreign(path)
