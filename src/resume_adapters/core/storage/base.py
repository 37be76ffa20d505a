"""The file operations that the core needs. Nothing else in the core touches a disk.

Each method is one operation that a crash can fall before or after. Tests stop a storage before its nth operation, so
every guarantee of the commit holds for every n.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Protocol


class Storage(Protocol):
    """What the core asks of a file system. Paths are absolute. Every method may raise :class:`OSError`."""

    def write(self, path: Path, content: bytes) -> None:
        """Create or replace a file. Neither atomic nor durable: see :meth:`replace` and :meth:`sync`."""

    def append(self, path: Path, content: bytes) -> None:
        """Add to the end of a file, creating it where it is missing."""

    def sync(self, path: Path) -> None:
        """Force a file's content, or a directory's entries, onto the disk."""

    def replace(self, source: Path, target: Path) -> None:
        """Rename, atomically replacing a file (or an empty directory) of that name."""

    def symlink(self, target: str, link: Path) -> bool:
        """Make a symbolic link; ``False`` where the file system has none."""

    def make_directory(self, path: Path) -> None:
        """Make a directory and its parents; no error where it exists."""

    def remove_file(self, path: Path) -> None:
        """Remove a file or a symbolic link (never what it points to)."""

    def remove_directory(self, path: Path) -> None:
        """Remove an empty directory."""

    def read(self, path: Path) -> bytes:
        """Return a file's content."""

    def digest(self, path: Path) -> tuple[int, str]:
        """Return a file's size and the XXH3-128 digest of its content."""


def files_under(directory: Path) -> Iterator[Path]:
    """Yield the regular files below a directory, in name order; symbolic links are not followed."""
    for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
        if entry.is_dir(follow_symlinks=False):
            yield from files_under(Path(entry.path))
        elif entry.is_file(follow_symlinks=False):
            yield Path(entry.path)


def write_atomically(storage: Storage, path: Path, content: bytes) -> None:
    """Replace a file so that a crash leaves the old or the new content, durably."""
    temporary = path.with_name(f".{path.name}.tmp")
    storage.write(temporary, content)
    storage.sync(temporary)
    storage.replace(temporary, path)
    storage.sync(path.parent)


Pointer = Literal["link", "file"]
"""How ``latest`` names the newest checkpoint: a relative symbolic link, or a text file of one line."""


def point_to(storage: Storage, pointer: Path, target: str, form: Pointer) -> None:
    """Replace a pointer atomically; where the file system has no symbolic links, it is a text file in any case."""
    temporary = pointer.with_name(f".{pointer.name}.tmp")
    with contextlib.suppress(FileNotFoundError):
        storage.remove_file(temporary)
    if form == "file" or not storage.symlink(target, temporary):
        storage.write(temporary, f"{target}\n".encode())
        storage.sync(temporary)
    storage.replace(temporary, pointer)
    storage.sync(pointer.parent)


def remove_tree(storage: Storage, directory: Path) -> None:
    """Remove a directory (or a file), files first, one operation at a time; symbolic links go, their targets stay."""
    if directory.is_symlink() or not directory.is_dir():
        storage.remove_file(directory)
        return
    for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
        if entry.is_dir(follow_symlinks=False):
            remove_tree(storage, Path(entry.path))
        else:
            storage.remove_file(Path(entry.path))
    storage.remove_directory(directory)
