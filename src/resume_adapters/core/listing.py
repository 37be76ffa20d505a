"""What is in a run directory: which checkpoints there are, and whether each is what its manifest says. Reads only."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from resume_adapters.core import manifest as manifests
from resume_adapters.core import place
from resume_adapters.core.manifest import FileEntry, Manifest
from resume_adapters.core.place import LATEST, SUPERSEDED, is_committed, is_pending
from resume_adapters.core.storage import Storage
from resume_adapters.errors import CheckpointDamaged, FormatTooNew, RunDirectoryUnusable

Foreign = Callable[[Path], int | None]
"""Asks an adapter about something that this package did not write: the step of a whole checkpoint, ``None`` for what is
none. Raises :class:`CheckpointDamaged` for a checkpoint that is not whole."""

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
        return entry.name.removesuffix(place.BESIDE) if place.is_added(Path(entry.path)) else entry.name
    return entry.name if entry.name.endswith(FILE_SUFFIX) else None


def newest_first(name: str, step: int, written: float = 0.0) -> tuple[int, bool, float, str]:
    """Return the key that sorts checkpoints into the order in which a resume considers them."""
    return -step, name.endswith(SUPERSEDED), -written, name


def _number(name: str) -> int:
    found = _LAST_NUMBER.search(name)
    return int(found[0]) if found else -1


def claim(storage: Storage, path: Path) -> tuple[int, float]:
    """Return the step that a manifest says and when it was written, or else the number in the name; -1 without either.

    Of two checkpoints of one step, the later one knows of the earlier.
    """
    try:
        manifest = inspect(storage, path)
        return manifest.step, manifest.written
    except (CheckpointDamaged, FormatTooNew):
        return _number(path.name), 0.0


def inspect(storage: Storage, path: Path) -> Manifest:
    """Read the manifest of a committed checkpoint.

    Raises:
        CheckpointDamaged: the manifest cannot be read, or the checkpoint is a link that leaves the run directory.
        FormatTooNew: a later version wrote it.
    """
    require_in_run_directory(path)
    try:
        return manifests.decode(storage.read(place.marker(path)))
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
            size = os.stat(place.locate(path, entry.path)).st_size
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
            _, digest = storage.digest(place.locate(path, entry.path))
        except OSError as error:
            raise CheckpointDamaged(f"{entry.path} cannot be read: {error.strerror}", path=path) from error
        if digest != entry.digest:
            raise CheckpointDamaged(
                f"{entry.path} has the digest {digest}, its manifest says {entry.digest}: its content has changed",
                path=path,
            )
        yield entry


def whole_foreign(path: Path, foreign: Foreign) -> int | None:
    """Ask the adapter about what has no manifest: its step, or ``None`` where it is no checkpoint.

    Raises:
        CheckpointDamaged: it is not whole, or has lost its manifest.
    """
    if place.has_lost_manifest(path):
        missing = place.marker(path).relative_to(path.parent if place.is_beside(path) else path)
        raise CheckpointDamaged(f"{missing} is missing, though the rest of the checkpoint is there", path=path)
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
    found = {path: newest_first(path.name, *claim(storage, path)) for path in candidates(run_directory)}
    for path in sorted(found, key=lambda path: found[path], reverse=True):
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
