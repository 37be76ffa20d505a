"""Where the things of a checkpoint lie, and what its markers say. Looks only.

A framework writes a checkpoint under one name: a directory, or a single file. What this package adds to it lies in one
directory: ``NAME/resume`` in a checkpoint that is a directory, ``NAME.resume`` beside one that is a file. Everything
else follows from that: the marker of the commit, that of a checkpoint that is being written, and the parts. In a
manifest both look alike: paths that begin with ``resume/`` are what this package added, all others the framework's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from resume_adapters.core.state import DIRECTORY, rank_file
from resume_adapters.core.storage import files_under

CONTROL = ".resume"
"""Where a run directory keeps what belongs to the run rather than to one checkpoint."""

LATEST = "latest"
MANIFEST = "manifest.json"
PENDING = "pending"
"""Name of the file that says that a checkpoint was begun by this package and is not committed. What has neither it nor
a manifest is never removed as unfinished: ``resume/`` alone may be anybody's."""

SUPERSEDED = ".superseded"
"""Suffix of a committed checkpoint whose name is being saved again: it stays valid until the new one is committed."""

BESIDE = f".{DIRECTORY}"
"""Suffix of the directory beside a checkpoint that is a file."""


def beside(checkpoint: Path) -> Path:
    """Return the directory that holds what this package adds to a checkpoint that is a file."""
    return checkpoint.with_name(checkpoint.name + BESIDE)


def within(checkpoint: Path) -> Path:
    """Return the directory that holds what this package adds to a checkpoint that is a directory."""
    return checkpoint / DIRECTORY


def is_added(directory: Path) -> bool:
    """Return whether a directory is what this package added to a checkpoint that is a file."""
    if not directory.name.endswith(BESIDE) or not directory.is_dir():
        return False
    return any((directory / name).is_file() for name in (MANIFEST, PENDING, f"{rank_file('', 0)}.json"))


def is_beside(checkpoint: Path) -> bool:
    """Return whether what this package added lies beside the checkpoint; a link has nothing of its own."""
    return not checkpoint.is_symlink() and is_added(beside(checkpoint))


def added(checkpoint: Path) -> Path:
    """Return the directory that holds what this package added to a checkpoint; of a link, to what it points to."""
    if checkpoint.is_symlink():
        checkpoint = Path(os.path.realpath(checkpoint))
    return beside(checkpoint) if is_beside(checkpoint) else within(checkpoint)


def content(checkpoint: Path) -> Path:
    """Return what the framework wrote.

    That is the checkpoint itself, but where one that is a file was cut short in stepping aside: its content goes first.
    """
    moved = superseded(checkpoint)
    if is_beside(checkpoint) and not checkpoint.exists() and moved.is_file() and not is_beside(moved):
        return moved
    return checkpoint


def locate(checkpoint: Path, path: str) -> Path:
    """Return a file of a checkpoint by its path in the manifest."""
    if checkpoint.is_symlink():
        checkpoint = Path(os.path.realpath(checkpoint))
    if not is_beside(checkpoint):
        return checkpoint / path
    own = f"{DIRECTORY}/"
    return beside(checkpoint) / path.removeprefix(own) if path.startswith(own) else content(checkpoint)


def files(checkpoint: Path) -> Iterator[tuple[Path, Path]]:
    """Yield the files of a checkpoint, each after its path for the manifest; without the markers of its state."""
    if is_beside(checkpoint):
        found = [(Path(checkpoint.name), content(checkpoint))] if content(checkpoint).is_file() else []
        own = beside(checkpoint)
        found += [(DIRECTORY / file.relative_to(own), file) for file in files_under(own)]
    else:
        found = [(file.relative_to(checkpoint), file) for file in files_under(checkpoint)]
    markers = (marker(checkpoint), pending_marker(checkpoint))
    return (each for each in found if each[1] not in markers)


def names(checkpoint: Path) -> list[Path]:
    """Return what of a checkpoint has a name of its own in the run directory, content first, as far as it is there."""
    own = [beside(checkpoint)] if is_beside(checkpoint) else []
    return [path for path in (checkpoint, *own) if os.path.lexists(path)]


def marker(checkpoint: Path) -> Path:
    """Return the file whose presence makes ``checkpoint`` committed."""
    return added(checkpoint) / MANIFEST


def pending_marker(checkpoint: Path) -> Path:
    """Return the file whose presence, without a manifest, says that ``checkpoint`` is not committed."""
    return added(checkpoint) / PENDING


def is_committed(checkpoint: Path) -> bool:
    """Return whether the checkpoint has its commit marker. Whether its files agree with it is another question."""
    return marker(checkpoint).is_file()


def is_pending(checkpoint: Path) -> bool:
    """Return whether the checkpoint was begun by this package and never committed, or was half removed by it."""
    return pending_marker(checkpoint).is_file() and not is_committed(checkpoint)


def has_lost_manifest(checkpoint: Path) -> bool:
    """Return whether the checkpoint holds what this package saves, and neither marker: it was committed once."""
    own = (added(checkpoint) / f"{rank_file('', 0)}.json").is_file()
    return own and not is_committed(checkpoint) and not is_pending(checkpoint)


def superseded(checkpoint: Path) -> Path:
    """Return where a committed checkpoint waits while its name is saved again."""
    return checkpoint.with_name(checkpoint.name + SUPERSEDED)


def has_stepped_aside(checkpoint: Path) -> bool:
    """Return whether a committed checkpoint gave its name free, wholly or half, and nothing has taken it."""
    if content(checkpoint) != checkpoint:
        return True
    return is_committed(superseded(checkpoint)) and not names(checkpoint)


def original(checkpoint: Path) -> Path:
    """Return where a checkpoint was before it stepped aside; itself, where it did not."""
    return checkpoint.with_name(checkpoint.name.removesuffix(SUPERSEDED))
