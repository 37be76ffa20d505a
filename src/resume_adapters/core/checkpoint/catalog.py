"""Which checkpoints a run directory holds. Reads only."""

from __future__ import annotations

import os
import re
from pathlib import Path

from resume_adapters.core.checkpoint import layout
from resume_adapters.core.checkpoint.checkpoint import CheckpointInfo
from resume_adapters.core.checkpoint.layout import LATEST, SUPERSEDED, is_committed, is_pending
from resume_adapters.core.checkpoint.validity import ForeignDetector, check_sizes, foreign_step, read_manifest
from resume_adapters.core.storage.base import Storage
from resume_adapters.errors import CheckpointDamaged, FormatTooNew, RunDirectoryUnusable

FILE_SUFFIX = ".ckpt"
"""What the names of checkpoints that are single files end in, where nothing of this package lies beside them."""

_LAST_NUMBER = re.compile(r"(\d+)(?!.*\d)")


def candidates(run_directory: Path) -> list[Path]:
    """Return what may be a checkpoint, newest first by the number in the name.

    That is every directory, every link, each file that this package or (by its suffix) Lightning may have made a
    checkpoint of, and what this package added to a file that is not there any more.

    Raises:
        RunDirectoryUnusable: the run directory is not a directory, or cannot be listed.
    """
    try:
        entries = list(os.scandir(run_directory))
    except FileNotFoundError:
        return []
    except NotADirectoryError as error:
        raise RunDirectoryUnusable(
            f"{run_directory} is a file; expected the directory in which the run's checkpoints live", path=run_directory
        ) from error
    except OSError as error:
        raise RunDirectoryUnusable(f"{run_directory} cannot be listed: {error.strerror}", path=run_directory) from error
    found = {name for entry in entries if entry.name != LATEST and (name := _checkpoint_name(entry)) is not None}
    return [run_directory / name for name in sorted(found, key=lambda name: newest_first(name, _number(name)))]


def _checkpoint_name(entry: os.DirEntry[str]) -> str | None:
    """Return the name of the checkpoint that an entry of a run directory may be, or may belong to."""
    if entry.name.startswith("."):
        return None
    if entry.is_symlink():
        return entry.name
    if entry.is_dir():
        return entry.name.removesuffix(layout.SIDECAR_SUFFIX) if layout.is_sidecar(Path(entry.path)) else entry.name
    return entry.name if entry.name.endswith(FILE_SUFFIX) else None


def newest_first(name: str, step: int, written: float = 0.0) -> tuple[int, bool, float, str]:
    """Return the key that sorts checkpoints into the order in which a resume considers them."""
    return -step, name.endswith(SUPERSEDED), -written, name


def _number(name: str) -> int:
    found = _LAST_NUMBER.search(name)
    return int(found[0]) if found else -1


def sort_key(storage: Storage, path: Path) -> tuple[int, float]:
    """Return the step that a manifest says and when it was written, or else the number in the name; -1 without either.

    Of two checkpoints of one step, the later one knows of the earlier.
    """
    try:
        manifest = read_manifest(storage, path)
        return manifest.step, manifest.written
    except (CheckpointDamaged, FormatTooNew):
        return _number(path.name), 0.0


def list_checkpoints(storage: Storage, run_directory: Path, foreign: ForeignDetector) -> list[CheckpointInfo]:
    """Describe every checkpoint of a run directory, oldest first, without reading the files' content."""
    rows = []
    found = {path: newest_first(path.name, *sort_key(storage, path)) for path in candidates(run_directory)}
    for path in sorted(found, key=lambda path: found[path], reverse=True):
        try:
            if is_pending(path):
                rows.append(CheckpointInfo(path, "pending", None, None, "was begun and never committed"))
            elif is_committed(path):
                manifest = read_manifest(storage, path)
                check_sizes(path, manifest)
                rows.append(CheckpointInfo(path, "committed", manifest.step, manifest))
            elif (step := foreign_step(path, foreign)) is not None:
                rows.append(CheckpointInfo(path, "foreign", step, None, "was made without resume-adapters"))
        except (CheckpointDamaged, FormatTooNew) as error:
            rows.append(CheckpointInfo(path, "damaged", None, None, str(error)))
    return rows
