"""Every path and marker of a checkpoint. Reads only, but for ``latest``.

A framework writes a checkpoint under one name: a directory, or a single file. What this package adds lies in one
directory: ``NAME/resume`` in a checkpoint that is a directory, ``NAME.resume`` beside one that is a file. All other
paths follow from that: the commit marker, the marker of a pending checkpoint, and the parts. In a manifest both kinds
look alike: this package's files are below ``resume/``, all others are the framework's.

Functions that take a storage look at the disk; the others only compute paths.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Literal

from resume_adapters.core.storage.base import Storage, is_present, leaves_under, temporary_path

EXTRAS = "resume"
"""Where a checkpoint keeps what this package adds to it."""

_RANK = re.compile(r"(?:^|\.)rank-(\d+)\.")


def rank_file(name: str, rank: int) -> str:
    """Return the file name stem of a rank's copy of a part; with an empty name, of the rank's own state."""
    return f"{name}.rank-{rank:05d}" if name else f"rank-{rank:05d}"


def rank_of(file: Path) -> int:
    """Return the rank that wrote a file of this package; zero if its name has no rank."""
    found = _RANK.search(file.name)
    return int(found[1]) if found else 0


_OWN_STATE = f"{rank_file('', 0)}.json"
"""The file of rank zero's own state, which every checkpoint of this package has."""

CONTROL = ".resume"
"""Where a run directory keeps what belongs to the run, not to one checkpoint."""

MANIFEST = "manifest.json"

PENDING = "pending"
"""Name of the file that marks a checkpoint as begun by this package and not committed. A checkpoint without this file
and without a manifest is never removed as unfinished: a directory ``resume/`` may be the user's."""


def pending_text(name: str) -> bytes:
    """Return the content of the file that marks a checkpoint as pending; a copy of it has another name."""
    return f"{name} is being written; {MANIFEST} ends that.\n".encode()


SUPERSEDED = ".superseded"
"""Suffix of a committed checkpoint while its name is saved again; it stays valid until the new one is committed."""

SIDECAR_SUFFIX = f".{EXTRAS}"
"""Suffix of the directory beside a checkpoint that is a file."""

LONGEST_NAME = 200
"""Bytes of a checkpoint's name: what is put before and behind it until it is removed must fit into 255, too."""


class CheckpointState(str, Enum):
    """What a name in a run directory stands for; the transitions are in :mod:`~resume_adapters.core.checkpoint.commit`.

    Whether the files of a committed checkpoint agree with its manifest, and whether something foreign is a checkpoint,
    is decided in :mod:`~resume_adapters.core.checkpoint.validity`.
    """

    PENDING = "pending"
    """Begun by this package and not committed, or half removed by it."""
    COMMITTED = "committed"
    """It has a manifest."""
    SUPERSEDED = "superseded"
    """It was committed, and was renamed so that its name can be saved again."""
    DAMAGED = "damaged"
    """It has files of this package and neither marker: it was committed once."""
    NEWER = "newer"
    """Its manifest has a later format than this version reads: only a listing says so."""
    WEIGHTS_ONLY = "weights-only"
    """It is committed, and nothing resumes from it: only a listing says so."""
    FOREIGN = "foreign"
    """It has no file of this package."""
    REMOVED = "removed"
    """Nothing has this name."""

    def __str__(self) -> str:
        return self.value


def sidecar_dir(checkpoint: Path) -> Path:
    """Return the directory of this package beside a checkpoint that is a file."""
    return checkpoint.with_name(checkpoint.name + SIDECAR_SUFFIX)


def inner_dir(checkpoint: Path) -> Path:
    """Return the directory of this package in a checkpoint that is a directory."""
    return checkpoint / EXTRAS


def own_dir(checkpoint: Path, *, is_file: bool) -> Path:
    """Return the directory of this package in a checkpoint, or beside one that is a file."""
    return sidecar_dir(checkpoint) if is_file else inner_dir(checkpoint)


def superseded_path(checkpoint: Path) -> Path:
    """Return the path of a committed checkpoint while its name is saved again."""
    return checkpoint.with_name(checkpoint.name + SUPERSEDED)


def original_path(checkpoint: Path) -> Path:
    """Return the path of a checkpoint before it was superseded; the same path if it was not."""
    return checkpoint.with_name(checkpoint.name.removesuffix(SUPERSEDED))


# ---- Where the parts of a checkpoint are


def is_sidecar(storage: Storage, directory: Path) -> bool:
    """Return whether a directory is this package's, beside a checkpoint that is a file."""
    if not directory.name.endswith(SIDECAR_SUFFIX) or not storage.is_directory(directory):
        return False
    return any(storage.is_file(directory / name) for name in (MANIFEST, PENDING, _OWN_STATE))


def has_sidecar(storage: Storage, checkpoint: Path) -> bool:
    """Return whether a checkpoint has this package's directory beside it; a symbolic link never has."""
    if not checkpoint.name or storage.is_link(checkpoint):  # the root, to which a link may lead, has no name
        return False
    return is_sidecar(storage, sidecar_dir(checkpoint))


def extras_dir(storage: Storage, checkpoint: Path) -> Path:
    """Return this package's directory of a checkpoint; for a symbolic link, that of its target."""
    if storage.is_link(checkpoint):
        checkpoint = storage.real_path(checkpoint)
    return sidecar_dir(checkpoint) if has_sidecar(storage, checkpoint) else inner_dir(checkpoint)


def manifest_path(storage: Storage, checkpoint: Path) -> Path:
    """Return the file whose presence makes a checkpoint committed."""
    return extras_dir(storage, checkpoint) / MANIFEST


def pending_path(storage: Storage, checkpoint: Path) -> Path:
    """Return the file whose presence, without a manifest, makes a checkpoint pending."""
    return extras_dir(storage, checkpoint) / PENDING


def payload(storage: Storage, checkpoint: Path) -> Path:
    """Return the path of what the framework wrote.

    That is the checkpoint itself, except for a file whose superseding was interrupted: the file is renamed first.
    """
    aside = superseded_path(checkpoint)
    if (
        has_sidecar(storage, checkpoint)
        and not storage.exists(checkpoint)
        and storage.is_file(aside)
        and not has_sidecar(storage, aside)
    ):
        return aside
    return checkpoint


def locate(storage: Storage, checkpoint: Path, path: str) -> Path:
    """Return a file of a checkpoint by its path in the manifest."""
    return locator(storage, checkpoint)(path)


def locator(storage: Storage, checkpoint: Path) -> Callable[[str], Path]:
    """Return what returns a file of a checkpoint by its path in the manifest; the disk is looked at once."""
    if storage.is_link(checkpoint):
        checkpoint = storage.real_path(checkpoint)
    if not has_sidecar(storage, checkpoint):
        return checkpoint.joinpath
    prefix, sidecar, content = f"{EXTRAS}/", sidecar_dir(checkpoint), payload(storage, checkpoint)
    return lambda path: sidecar / path.removeprefix(prefix) if path.startswith(prefix) else content


def files(storage: Storage, checkpoint: Path) -> Iterator[tuple[Path, Path]]:
    """Yield the regular files of a checkpoint, each after its path for the manifest; without the markers."""
    return ((path, file) for path, file, kind in leaves(storage, checkpoint) if kind == "file")


def leaves(storage: Storage, checkpoint: Path) -> Iterator[tuple[Path, Path, str]]:
    """Yield the path for the manifest, the path and the kind of all in a checkpoint but directories and markers."""
    if has_sidecar(storage, checkpoint):
        content, sidecar = payload(storage, checkpoint), sidecar_dir(checkpoint)
        found = [(Path(checkpoint.name), content, "file")] if storage.is_file(content) else []
        found += [(EXTRAS / file.relative_to(sidecar), file, kind) for file, kind in leaves_under(storage, sidecar)]
    elif storage.is_file(checkpoint):  # a framework's own, without the package
        found = [(Path(checkpoint.name), checkpoint, "file")]
    else:
        found = [(file.relative_to(checkpoint), file, kind) for file, kind in leaves_under(storage, checkpoint)]
    markers = (manifest_path(storage, checkpoint), pending_path(storage, checkpoint))
    return (each for each in found if each[1] not in markers)


def root_paths(storage: Storage, checkpoint: Path) -> list[Path]:
    """Return the existing top-level paths of a checkpoint, payload first."""
    sidecar = [sidecar_dir(checkpoint)] if has_sidecar(storage, checkpoint) else []
    return [path for path in (checkpoint, *sidecar) if is_present(storage, path)]


# ---- What the markers say


def state_of(storage: Storage, checkpoint: Path) -> CheckpointState:
    """Return the state of a checkpoint; for a symbolic link, that of its target."""
    extras = extras_dir(storage, checkpoint)
    if storage.is_file(extras / MANIFEST):
        return CheckpointState.COMMITTED
    if storage.is_file(extras / PENDING):
        return CheckpointState.PENDING
    if storage.is_file(extras / _OWN_STATE):
        return CheckpointState.DAMAGED
    if root_paths(storage, checkpoint):
        return CheckpointState.FOREIGN
    is_superseded = is_committed(storage, superseded_path(checkpoint))
    return CheckpointState.SUPERSEDED if is_superseded else CheckpointState.REMOVED


def is_committed(storage: Storage, checkpoint: Path) -> bool:
    """Return whether a checkpoint has its commit marker."""
    return storage.is_file(manifest_path(storage, checkpoint))


def is_unfinished(storage: Storage, checkpoint: Path) -> bool:
    """Return whether a checkpoint was committed under its present name, and what follows a commit was cut off."""
    marker = pending_path(storage, checkpoint)
    is_marked = is_committed(storage, checkpoint) and storage.is_file(marker)
    return is_marked and storage.read(marker) == pending_text(original_path(checkpoint).name)


def must_be_restored(storage: Storage, checkpoint: Path) -> bool:
    """Return whether a committed checkpoint was superseded, wholly or half, and nothing has taken its name."""
    is_half = payload(storage, checkpoint) != checkpoint
    return is_half or state_of(storage, checkpoint) is CheckpointState.SUPERSEDED


# ---- What names the newest checkpoint, for people and for the bare framework

LATEST = "latest"
"""A resume never trusts it alone: a crash may leave it behind the last commit."""

Pointer = Literal["link", "file"]
"""How ``latest`` names the newest checkpoint: a relative symbolic link, or a text file of one line."""


def point_latest(storage: Storage, run_directory: Path, name: str, form: Pointer) -> None:
    """Point ``latest`` at a checkpoint, atomically; on a file system without symbolic links it is always a text file.

    Args:
        storage: the file operations.
        run_directory: where the checkpoints are.
        name: the checkpoint.
        form: how ``latest`` names it.
    """
    pointer = run_directory / LATEST
    temporary = temporary_path(pointer)
    if form == "file" or not storage.symlink(name, temporary):
        storage.write(temporary, f"{name}\n".encode())
        storage.sync(temporary)
    storage.replace(temporary, pointer)
    storage.sync(run_directory)


def latest_form(storage: Storage, run_directory: Path) -> Pointer:
    """Return how ``latest`` names a checkpoint; a link, where there is none."""
    pointer = run_directory / LATEST
    return "file" if storage.is_file(pointer) and not storage.is_link(pointer) else "link"


def latest_name(storage: Storage, run_directory: Path) -> str | None:
    """Return the name of the checkpoint that ``latest`` names; ``None`` where there is no ``latest``."""
    pointer = run_directory / LATEST
    if storage.is_link(pointer):
        return Path(storage.read_link(pointer)).name
    return storage.read(pointer).decode(errors="replace").strip() if storage.is_file(pointer) else None
