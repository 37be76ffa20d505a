"""The file operations that the core needs, for reading and for writing. Nothing else in the core touches a disk.

Each method that changes something is one operation that a crash can fall before or after. Tests stop a storage before
its nth operation, so every guarantee of the commit holds for every n.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple, Protocol


class Entry(NamedTuple):
    """An entry of a directory; a symbolic link is a link, whatever it points to."""

    name: str
    kind: Literal["file", "directory", "link", "other"]


class Storage(Protocol):
    """A file system. Paths are absolute. Every method may raise :class:`OSError`."""

    # ---- Reading

    def exists(self, path: Path) -> bool:
        """Return whether there is a file or a directory, or a symbolic link to one."""

    def is_file(self, path: Path) -> bool:
        """Return whether there is a regular file, or a symbolic link to one."""

    def is_directory(self, path: Path) -> bool:
        """Return whether there is a directory, or a symbolic link to one."""

    def is_link(self, path: Path) -> bool:
        """Return whether there is a symbolic link, also one to nothing."""

    def read_link(self, path: Path) -> str:
        """Return what a symbolic link points to, as it is written in the link."""

    def real_path(self, path: Path) -> Path:
        """Return the path without symbolic links; missing components are kept."""

    def size(self, path: Path) -> int:
        """Return the size of a file in bytes."""

    def entries(self, path: Path) -> list[Entry]:
        """Return the entries of a directory, in no particular order."""

    def read(self, path: Path) -> bytes:
        """Return the content of a file."""

    def digest(self, path: Path) -> tuple[int, str]:
        """Return the size of a file and the XXH3-128 digest of its content."""

    # ---- Writing

    def write(self, path: Path, content: bytes) -> None:
        """Create or replace a file. Neither atomic nor durable: see :meth:`replace` and :meth:`sync`."""

    def append(self, path: Path, content: bytes) -> None:
        """Append to a file; create it if it is missing."""

    def sync(self, path: Path) -> None:
        """Force the content of a file, or the entries of a directory, onto the disk."""

    def replace(self, source: Path, target: Path) -> None:
        """Rename, atomically replacing a file (or an empty directory) of that name."""

    def symlink(self, target: str, link: Path) -> bool:
        """Create a symbolic link; return ``False`` if the file system has none."""

    def make_directory(self, path: Path) -> None:
        """Create a directory and its parents; no error if it exists."""

    def remove_file(self, path: Path) -> None:
        """Remove a file or a symbolic link (never what it points to)."""

    def remove_directory(self, path: Path) -> None:
        """Remove an empty directory."""


def is_present(storage: Storage, path: Path) -> bool:
    """Return whether something has this name, be it a symbolic link to nothing."""
    return storage.is_link(path) or storage.exists(path)


def files_under(storage: Storage, directory: Path) -> Iterator[Path]:
    """Yield the regular files below a directory, in name order; symbolic links are not followed."""
    for entry in sorted(storage.entries(directory)):
        if entry.kind == "directory":
            yield from files_under(storage, directory / entry.name)
        elif entry.kind == "file":
            yield directory / entry.name


def write_atomically(storage: Storage, path: Path, content: bytes) -> None:
    """Replace a file durably, so that a crash leaves either the old or the new content."""
    temporary = path.with_name(f".{path.name}.tmp")
    storage.write(temporary, content)
    storage.sync(temporary)
    storage.replace(temporary, path)
    storage.sync(path.parent)


Pointer = Literal["link", "file"]
"""How ``latest`` names the newest checkpoint: a relative symbolic link, or a text file of one line."""


def point_to(storage: Storage, pointer: Path, target: str, form: Pointer) -> None:
    """Replace a pointer atomically; on a file system without symbolic links it is always a text file."""
    temporary = pointer.with_name(f".{pointer.name}.tmp")
    with contextlib.suppress(FileNotFoundError):
        storage.remove_file(temporary)
    if form == "file" or not storage.symlink(target, temporary):
        storage.write(temporary, f"{target}\n".encode())
        storage.sync(temporary)
    storage.replace(temporary, pointer)
    storage.sync(pointer.parent)


def remove_tree(storage: Storage, directory: Path) -> None:
    """Remove a directory (or a file), files first, one operation at a time; the targets of symbolic links stay."""
    if storage.is_link(directory) or not storage.is_directory(directory):
        storage.remove_file(directory)
        return
    for entry in sorted(storage.entries(directory)):
        if entry.kind == "directory":
            remove_tree(storage, directory / entry.name)
        else:
            storage.remove_file(directory / entry.name)
    storage.remove_directory(directory)
