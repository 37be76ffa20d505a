"""Every path of a checkpoint, and what its markers say. Looks only.

A framework writes a checkpoint under one name: a directory, or a single file. What this package adds to it lies in one
directory: ``NAME/resume`` in a checkpoint that is a directory, ``NAME.resume`` beside one that is a file. Everything
else follows from that: the marker of the commit, that of a checkpoint that is being written, and the parts. In a
manifest both look alike: paths that begin with ``resume/`` are what this package added, all others the framework's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from resume_adapters.core.storage.base import files_under

EXTRAS = "resume"
"""Where a checkpoint keeps what this package adds to it."""

_RANK = re.compile(r"(?:^|\.)rank-(\d+)\.")


def rank_file(name: str, rank: int) -> str:
    """Return the file name stem of a rank's own copy of a part; with an empty name, of what is the rank's alone."""
    return f"{name}.rank-{rank:05d}" if name else f"rank-{rank:05d}"


def rank_of(file: Path) -> int:
    """Return the rank whose copy of a part a file is; zero where the name says nothing."""
    found = _RANK.search(file.name)
    return int(found[1]) if found else 0


CONTROL = ".resume"
"""Where a run directory keeps what belongs to the run rather than to one checkpoint."""

LATEST = "latest"

MANIFEST = "manifest.json"

PENDING = "pending"
"""Name of the file that says that a checkpoint was begun by this package and is not committed. What has neither it nor
a manifest is never removed as unfinished: ``resume/`` alone may be anybody's."""

SUPERSEDED = ".superseded"
"""Suffix of a committed checkpoint whose name is being saved again: it stays valid until the new one is committed."""

SIDECAR_SUFFIX = f".{EXTRAS}"
"""Suffix of the directory beside a checkpoint that is a file."""


def sidecar_dir(checkpoint: Path) -> Path:
    """Return the directory that holds what this package adds to a checkpoint that is a file."""
    return checkpoint.with_name(checkpoint.name + SIDECAR_SUFFIX)


def inner_dir(checkpoint: Path) -> Path:
    """Return the directory that holds what this package adds to a checkpoint that is a directory."""
    return checkpoint / EXTRAS


def is_sidecar(directory: Path) -> bool:
    """Return whether a directory is what this package added to a checkpoint that is a file."""
    if not directory.name.endswith(SIDECAR_SUFFIX) or not directory.is_dir():
        return False
    return any((directory / name).is_file() for name in (MANIFEST, PENDING, f"{rank_file('', 0)}.json"))


def has_sidecar(checkpoint: Path) -> bool:
    """Return whether what this package added lies beside the checkpoint; a link has nothing of its own."""
    return not checkpoint.is_symlink() and is_sidecar(sidecar_dir(checkpoint))


def extras_dir(checkpoint: Path) -> Path:
    """Return the directory that holds what this package added to a checkpoint; of a link, to what it points to."""
    if checkpoint.is_symlink():
        checkpoint = Path(os.path.realpath(checkpoint))
    return sidecar_dir(checkpoint) if has_sidecar(checkpoint) else inner_dir(checkpoint)


def payload(checkpoint: Path) -> Path:
    """Return what the framework wrote.

    That is the checkpoint itself, but where one that is a file was cut short in stepping aside: its content goes first.
    """
    moved = superseded_path(checkpoint)
    if has_sidecar(checkpoint) and not checkpoint.exists() and moved.is_file() and not has_sidecar(moved):
        return moved
    return checkpoint


def locate(checkpoint: Path, path: str) -> Path:
    """Return a file of a checkpoint by its path in the manifest."""
    if checkpoint.is_symlink():
        checkpoint = Path(os.path.realpath(checkpoint))
    if not has_sidecar(checkpoint):
        return checkpoint / path
    own = f"{EXTRAS}/"
    return sidecar_dir(checkpoint) / path.removeprefix(own) if path.startswith(own) else payload(checkpoint)


def files(checkpoint: Path) -> Iterator[tuple[Path, Path]]:
    """Yield the files of a checkpoint, each after its path for the manifest; without the markers of its state."""
    if has_sidecar(checkpoint):
        found = [(Path(checkpoint.name), payload(checkpoint))] if payload(checkpoint).is_file() else []
        own = sidecar_dir(checkpoint)
        found += [(EXTRAS / file.relative_to(own), file) for file in files_under(own)]
    else:
        found = [(file.relative_to(checkpoint), file) for file in files_under(checkpoint)]
    markers = (manifest_path(checkpoint), pending_path(checkpoint))
    return (each for each in found if each[1] not in markers)


def root_paths(checkpoint: Path) -> list[Path]:
    """Return what of a checkpoint has a name of its own in the run directory, content first, as far as it is there."""
    own = [sidecar_dir(checkpoint)] if has_sidecar(checkpoint) else []
    return [path for path in (checkpoint, *own) if os.path.lexists(path)]


def manifest_path(checkpoint: Path) -> Path:
    """Return the file whose presence makes ``checkpoint`` committed."""
    return extras_dir(checkpoint) / MANIFEST


def pending_path(checkpoint: Path) -> Path:
    """Return the file whose presence, without a manifest, says that ``checkpoint`` is not committed."""
    return extras_dir(checkpoint) / PENDING


def is_committed(checkpoint: Path) -> bool:
    """Return whether the checkpoint has its commit marker. Whether its files agree with it is another question."""
    return manifest_path(checkpoint).is_file()


def is_pending(checkpoint: Path) -> bool:
    """Return whether the checkpoint was begun by this package and never committed, or was half removed by it."""
    return pending_path(checkpoint).is_file() and not is_committed(checkpoint)


def has_lost_manifest(checkpoint: Path) -> bool:
    """Return whether the checkpoint holds what this package saves, and neither marker: it was committed once."""
    own = (extras_dir(checkpoint) / f"{rank_file('', 0)}.json").is_file()
    return own and not is_committed(checkpoint) and not is_pending(checkpoint)


def superseded_path(checkpoint: Path) -> Path:
    """Return where a committed checkpoint waits while its name is saved again."""
    return checkpoint.with_name(checkpoint.name + SUPERSEDED)


def is_superseded(checkpoint: Path) -> bool:
    """Return whether a committed checkpoint gave its name free, wholly or half, and nothing has taken it."""
    if payload(checkpoint) != checkpoint:
        return True
    return is_committed(superseded_path(checkpoint)) and not root_paths(checkpoint)


def original_path(checkpoint: Path) -> Path:
    """Return where a checkpoint was before it stepped aside; itself, where it did not."""
    return checkpoint.with_name(checkpoint.name.removesuffix(SUPERSEDED))
