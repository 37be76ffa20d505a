"""The checkpoints of a run directory. Reads only."""

from __future__ import annotations

import re
from pathlib import Path

from resume_adapters.core.checkpoint import layout
from resume_adapters.core.checkpoint.checkpoint import CheckpointInfo
from resume_adapters.core.checkpoint.layout import LATEST, SUPERSEDED, CheckpointState, state_of
from resume_adapters.core.checkpoint.validity import ForeignDetector, check_sizes, foreign_step, read_manifest
from resume_adapters.core.storage.base import Entry, Storage
from resume_adapters.errors import CheckpointDamaged, FormatTooNew, RunDirectoryUnusable

FILE_SUFFIX = ".ckpt"
"""Suffix of checkpoints that are single files, if this package has nothing beside them."""

_LAST_NUMBER = re.compile(r"(\d+)(?!.*\d)")


def candidates(storage: Storage, run_directory: Path) -> list[Path]:
    """Return the paths that may be checkpoints, newest first by the number in the name.

    These are all directories and links, the files with this package's directory beside them or with Lightning's suffix,
    and checkpoints of which only this package's directory is left.

    Raises:
        RunDirectoryUnusable: the run directory is not a directory, or cannot be listed.
    """
    try:
        entries = storage.entries(run_directory)
    except FileNotFoundError:
        return []
    except NotADirectoryError as error:
        raise RunDirectoryUnusable(
            f"{run_directory} is a file; expected the directory of the run's checkpoints", path=run_directory
        ) from error
    except OSError as error:
        raise RunDirectoryUnusable(f"{run_directory} cannot be listed: {error.strerror}", path=run_directory) from error
    names = {_checkpoint_name(storage, run_directory, entry) for entry in entries if entry.name != LATEST}
    found = [name for name in names if name is not None]
    return [run_directory / name for name in sorted(found, key=lambda name: newest_first(name, _number(name)))]


def _checkpoint_name(storage: Storage, run_directory: Path, entry: Entry) -> str | None:
    """Return the name of the checkpoint that an entry of a run directory may be, or belong to."""
    if entry.name.startswith("."):
        return None
    if entry.kind == "directory" and layout.is_sidecar(storage, run_directory / entry.name):
        return entry.name.removesuffix(layout.SIDECAR_SUFFIX)
    if entry.kind in ("link", "directory") or entry.name.endswith(FILE_SUFFIX):
        return entry.name
    return None


def newest_first(name: str, step: int, written: float = 0.0) -> tuple[int, bool, float, str]:
    """Return the key that sorts checkpoints in the order in which a resume tries them."""
    return -step, name.endswith(SUPERSEDED), -written, name


def _number(name: str) -> int:
    found = _LAST_NUMBER.search(name)
    return int(found[0]) if found else -1


def sort_key(storage: Storage, path: Path) -> tuple[int, float]:
    """Return the step and the time of the manifest; without a manifest, the number in the name, or -1.

    Of two checkpoints of one step, the one written later is newer.
    """
    try:
        manifest = read_manifest(storage, path)
        return manifest.step, manifest.written
    except (CheckpointDamaged, FormatTooNew):
        return _number(path.name), 0.0


def list_checkpoints(storage: Storage, run_directory: Path, foreign: ForeignDetector) -> list[CheckpointInfo]:
    """Describe every checkpoint of a run directory, oldest first, without reading the files' content."""
    rows = []
    found = {path: newest_first(path.name, *sort_key(storage, path)) for path in candidates(storage, run_directory)}
    for path in sorted(found, key=lambda path: found[path], reverse=True):
        try:
            state = state_of(storage, path)
            if state is CheckpointState.PENDING:
                rows.append(CheckpointInfo(path, state, None, None, "was begun and never committed"))
            elif state is CheckpointState.COMMITTED:
                manifest = read_manifest(storage, path)
                check_sizes(storage, path, manifest)
                rows.append(CheckpointInfo(path, state, manifest.step, manifest))
            elif (step := foreign_step(storage, path, foreign)) is not None:
                rows.append(
                    CheckpointInfo(path, CheckpointState.FOREIGN, step, None, "was made without resume-adapters")
                )
        except (CheckpointDamaged, FormatTooNew) as error:
            rows.append(CheckpointInfo(path, CheckpointState.DAMAGED, None, None, str(error)))
    return rows
