"""Latest valid: which checkpoint a run resumes from, what was rejected, and why. Reads only.

Whatever ``latest`` says is a hint for people: every candidate in the run directory is considered, newest step first,
and the first that is valid on every rank is taken.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from resume_adapters.core import manifest as manifests
from resume_adapters.core.commit import CONTROL, LATEST, SUPERSEDED, is_committed, is_pending, marker
from resume_adapters.core.manifest import FileEntry, Manifest
from resume_adapters.core.ranks import Ranks
from resume_adapters.core.storage import Storage
from resume_adapters.errors import (
    CheckpointDamaged,
    FormatTooNew,
    NoValidCheckpoint,
    RunDirectoryUnusable,
    UnsupportedSetting,
)

Foreign = Callable[[Path], int | None]
"""Asks an adapter about a directory that this package did not write: the step of a whole checkpoint, ``None`` for
something else. Raises :class:`CheckpointDamaged` for a checkpoint that is not whole."""

_LAST_NUMBER = re.compile(r"(\d+)(?!.*\d)")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that can be resumed from; ``manifest`` is ``None`` for a foreign one."""

    path: Path
    step: int
    manifest: Manifest | None


@dataclass(frozen=True)
class Rejected:
    """A checkpoint that was passed over, and why."""

    path: Path
    reason: str


@dataclass(frozen=True)
class Choice:
    """What to resume from (``None``: start fresh), and what newer candidates were passed over."""

    checkpoint: Checkpoint | None
    rejected: tuple[Rejected, ...]


def candidates(run_directory: Path) -> list[Path]:
    """Return what may be a checkpoint, newest first by the number in its name.

    Raises:
        RunDirectoryUnusable: the run directory is not a directory.
    """
    try:
        entries = list(os.scandir(run_directory))
    except FileNotFoundError:
        return []
    except NotADirectoryError as error:
        raise RunDirectoryUnusable(
            f"{run_directory} is a file; expected the directory in which the run's checkpoints live", path=run_directory
        ) from error
    found = [
        Path(entry.path)
        for entry in entries
        if entry.name not in (CONTROL, LATEST) and (entry.is_symlink() or entry.is_dir())
    ]
    return sorted(found, key=_newest_first)


def _newest_first(path: Path) -> tuple[int, bool, str]:
    number = _LAST_NUMBER.search(path.name)
    return -int(number[0]) if number else 1, path.name.endswith(SUPERSEDED), path.name


def inspect(storage: Storage, path: Path) -> Manifest:
    """Read the manifest of a committed checkpoint.

    Raises:
        CheckpointDamaged: the manifest cannot be read, or the checkpoint is a link that leaves the run directory.
        FormatTooNew: a later version wrote it.
    """
    if path.is_symlink() and path.resolve().parent != path.parent.resolve():
        raise CheckpointDamaged(f"is a symbolic link that leaves the run directory ({os.readlink(path)})", path=path)
    try:
        return manifests.decode(storage.read(marker(path)))
    except OSError as error:
        raise CheckpointDamaged(f"manifest.json cannot be read: {error.strerror}", path=path) from error


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


def latest_valid(storage: Storage, ranks: Ranks, run_directory: Path, foreign: Foreign) -> Choice:
    """Choose the newest checkpoint that is valid on every rank. Every rank must ask.

    Raises:
        NoValidCheckpoint: there are checkpoints, and none is valid.
        FormatTooNew: the newest committed one was written by a later version; an older one is not taken in its place.
    """
    seen = ranks.gather([path.name for path in candidates(run_directory)])
    names = sorted({name for of_rank in seen for name in of_rank}, key=lambda name: _newest_first(Path(name)))
    rejected: list[Rejected] = []
    for name in names:
        path = run_directory / name
        step, verdict = _judge(storage, ranks, path, foreign)
        answers = ranks.gather((step, verdict))
        verdicts = [(rank, reason) for rank, (_, reason) in enumerate(answers) if reason is not None]
        if verdicts:
            rank, reason = verdicts[0]
            rejected.append(Rejected(path, reason if ranks.world_size == 1 else f"rank {rank}: {reason}"))
        elif len({of_rank for of_rank, _ in answers}) > 1:
            steps = [of_rank for of_rank, _ in answers]
            rejected.append(Rejected(path, f"the ranks see different checkpoints of that name: steps {steps}"))
        elif step is not None:
            manifest = inspect(storage, path) if is_committed(path) else None
            return Choice(Checkpoint(path, step, manifest), tuple(rejected))
    if rejected:
        raise no_valid(run_directory, rejected)
    return Choice(None, ())


def _judge(storage: Storage, ranks: Ranks, path: Path, foreign: Foreign) -> tuple[int | None, str | None]:
    """Return this rank's answer: the step of a checkpoint valid here, or why it is not; neither for no checkpoint."""
    try:
        if is_pending(path):
            return None, None
        if not path.exists():
            return None, "is a dangling link" if path.is_symlink() else "is not there"
        if not is_committed(path) and not path.is_symlink():
            return foreign(path), None
        manifest = inspect(storage, path)
        check_sizes(path, manifest)
        mine = tuple(entry for entry in manifest.files if entry.rank % ranks.world_size == ranks.rank)
        for _ in check_digests(storage, path, mine):
            pass
        return manifest.step, None
    except CheckpointDamaged as damage:
        return None, str(damage)
    except FormatTooNew as error:
        raise FormatTooNew(f"{path}: {error}", path=path) from error


def no_valid(run_directory: Path, rejected: list[Rejected]) -> NoValidCheckpoint:
    """Return the error that lists what was found and why none of it can be resumed from."""
    lines = "".join(f"\n  {each.path.name}: {each.reason}" for each in rejected)
    return NoValidCheckpoint(
        f"{run_directory} holds checkpoints, but none is valid:{lines}\n"
        'Repair one of them, or pass resume="scratch!" to set them aside and start from zero.',
        path=run_directory,
    )


def named(storage: Storage, path: Path, foreign: Foreign) -> Checkpoint:
    """Check the checkpoint that a user names as the start of a run that has none of its own.

    Raises:
        UnsupportedSetting: the path is not a directory.
        CheckpointDamaged: it is no checkpoint, or not a valid one.
    """
    if not path.is_dir():
        raise UnsupportedSetting(
            f'resume={str(path)!r} is not a directory; expected "auto", "scratch", "scratch!" or a checkpoint',
            path=path,
        )
    try:
        if not is_committed(path):
            step = foreign(path)
            if step is None:
                raise CheckpointDamaged("it is not a checkpoint")
            return Checkpoint(path, step, None)
        manifest = inspect(storage, path)
        check_sizes(path, manifest)
        for _ in check_digests(storage, path, manifest.files):
            pass
        return Checkpoint(path, manifest.step, manifest)
    except CheckpointDamaged as damage:
        raise CheckpointDamaged(f"cannot start from {path}: {damage}", path=path) from damage


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
            elif is_committed(path) or path.is_symlink():
                manifest = inspect(storage, path)
                check_sizes(path, manifest)
                rows.append(Listed(path, "committed", manifest.step, manifest))
            elif (step := foreign(path)) is not None:
                rows.append(Listed(path, "foreign", step, None, "was made without resume-adapters"))
        except (CheckpointDamaged, FormatTooNew) as error:
            rows.append(Listed(path, "damaged", None, None, str(error)))
    return rows
