"""``latest``: what names the newest checkpoint of a run directory, for people and for the bare framework.

A resume never trusts it alone: a crash may leave it behind the last commit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from resume_adapters.core.storage.base import Storage, temporary_path

LATEST = "latest"

Pointer = Literal["link", "file"]
"""How ``latest`` names the newest checkpoint: a relative symbolic link, or a text file of one line."""


def point_latest(storage: Storage, run_directory: Path, name: str, form: Pointer) -> None:
    """Let ``latest`` name a checkpoint, atomically; on a file system without symbolic links it is always a text file.

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
