"""What is in a run directory: which checkpoints there are, and whether each is what its manifest says. Reads only."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from resume_adapters.core import manifest as manifests
from resume_adapters.core.commit import CONTROL, LATEST, SUPERSEDED, has_lost_manifest, is_committed, is_pending, marker
from resume_adapters.core.manifest import FileEntry, Manifest
from resume_adapters.core.storage import Storage
from resume_adapters.errors import CheckpointDamaged, FormatTooNew, RunDirectoryUnusable

Foreign = Callable[[Path], int | None]
"""Asks an adapter about a directory that this package did not write: the step of a whole checkpoint, ``None`` for
something else. Raises :class:`CheckpointDamaged` for a checkpoint that is not whole."""

_LAST_NUMBER = re.compile(r"(\d+)(?!.*\d)")


def candidates(run_directory: Path) -> list[Path]:
    """Return the directories that may be a checkpoint, newest first by the number in the name.

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
    found = [
        Path(entry.path)
        for entry in entries
        if entry.name not in (CONTROL, LATEST) and (entry.is_symlink() or entry.is_dir())
    ]
    return sorted(found, key=lambda path: newest_first(path.name, _number(path.name)))


def newest_first(name: str, step: int) -> tuple[int, bool, str]:
    """Return the key that sorts checkpoints into the order in which a resume considers them."""
    return -step, name.endswith(SUPERSEDED), name


def _number(name: str) -> int:
    found = _LAST_NUMBER.search(name)
    return int(found[0]) if found else -1


def claimed_step(storage: Storage, path: Path) -> int:
    """Return the step that a directory's manifest says, or else the number in its name; -1 without either."""
    try:
        return inspect(storage, path).step
    except (CheckpointDamaged, FormatTooNew):
        return _number(path.name)


def inspect(storage: Storage, path: Path) -> Manifest:
    """Read the manifest of a committed checkpoint.

    Raises:
        CheckpointDamaged: the manifest cannot be read, or the checkpoint is a link that leaves the run directory.
        FormatTooNew: a later version wrote it.
    """
    require_in_run_directory(path)
    try:
        return manifests.decode(storage.read(marker(path)))
    except OSError as error:
        raise CheckpointDamaged(f"manifest.json cannot be read: {error.strerror}", path=path) from error


def require_in_run_directory(path: Path) -> None:
    """Refuse a checkpoint that is a symbolic link to somewhere else.

    Raises:
        CheckpointDamaged: it is one.
    """
    if path.is_symlink() and os.path.dirname(os.path.realpath(path)) != os.path.realpath(path.parent):
        raise CheckpointDamaged(f"is a symbolic link that leaves the run directory ({os.readlink(path)})", path=path)


def check_sizes(path: Path, manifest: Manifest) -> None:
    """Check that every file of a manifest is there with its size.

    Raises:
        CheckpointDamaged: naming the first file that is not.
    """
    for entry in manifest.files:
        try:
            size = os.stat(path / entry.path).st_size
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
            _, digest = storage.digest(path / entry.path)
        except OSError as error:
            raise CheckpointDamaged(f"{entry.path} cannot be read: {error.strerror}", path=path) from error
        if digest != entry.digest:
            raise CheckpointDamaged(
                f"{entry.path} has the digest {digest}, its manifest says {entry.digest}: its content has changed",
                path=path,
            )
        yield entry


def whole_foreign(path: Path, foreign: Foreign) -> int | None:
    """Ask the adapter about a directory without a manifest: its step, or ``None`` where it is no checkpoint.

    Raises:
        CheckpointDamaged: it is not whole, or has lost its manifest.
    """
    if has_lost_manifest(path):
        raise CheckpointDamaged(
            "resume/manifest.json is missing, though the rest of the checkpoint is there", path=path
        )
    return foreign(path)


@dataclass(frozen=True)
class Listed:
    """One row of a run directory's listing. ``state`` is committed, pending, damaged or foreign."""

    path: Path
    state: str
    step: int | None
    manifest: Manifest | None
    reason: str = ""


def listing(storage: Storage, run_directory: Path, foreign: Foreign) -> list[Listed]:
    """Describe every checkpoint of a run directory, oldest first, without reading the files' content."""
    rows = []
    for path in reversed(candidates(run_directory)):
        try:
            if is_pending(path):
                rows.append(Listed(path, "pending", None, None, "was begun and never committed"))
            elif is_committed(path):
                manifest = inspect(storage, path)
                check_sizes(path, manifest)
                rows.append(Listed(path, "committed", manifest.step, manifest))
            elif (step := whole_foreign(path, foreign)) is not None:
                rows.append(Listed(path, "foreign", step, None, "was made without resume-adapters"))
        except (CheckpointDamaged, FormatTooNew) as error:
            rows.append(Listed(path, "damaged", None, None, str(error)))
    return rows
