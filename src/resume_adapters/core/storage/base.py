"""The file operations that the core needs, for reading and for writing. Nothing else in the core touches a disk.

Each method that changes something is one operation that a crash can fall before or after. Tests stop a storage before
its nth operation, so every guarantee of the commit holds for every n.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import re
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, cast

import xxhash

_TEMPORARY = re.compile(r"\..+?(\.[0-9a-f]{8})?\.tmp")


Bytes = bytes | memoryview
"""What a file is written from."""


class Entry(NamedTuple):
    """An entry of a directory; a symbolic link is a link, whatever it points to."""

    name: str
    kind: Literal["file", "directory", "link", "other"]


class Stamp(NamedTuple):
    """A file as it was when it was looked at: replaced or changed, it has another one."""

    inode: int
    bytes: int
    changed: int


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

    def free_bytes(self, path: Path) -> int:
        """Return how many bytes this process may still write to the file system of a path; quotas are not known."""

    def stamp(self, path: Path) -> Stamp | None:
        """Return what tells whether a file has changed; ``None`` if there is no regular file of that name."""

    def entries(self, path: Path) -> list[Entry]:
        """Return the entries of a directory, in no particular order."""

    def read(self, path: Path) -> bytes:
        """Return the content of a file."""

    def read_range(self, path: Path, offset: int, count: int) -> bytes:
        """Return so many bytes of a file from an offset on; fewer where it ends before."""

    def digest(self, path: Path, *, skip_holes: bool = False) -> tuple[int, str]:
        """Return the size of a file and the XXH3-128 digest of its content.

        Args:
            path: the file.
            skip_holes: do not read the zeros that take no place on the disk: a file that claims to be large costs
                little. Of a file that was just written, some file systems do not know yet what takes a place.
        """

    # ---- Writing

    def write(self, path: Path, content: bytes) -> None:
        """Create or replace a file. Neither atomic nor durable: see :meth:`replace` and :meth:`sync`."""

    def write_range(self, path: Path, offset: int, content: Bytes) -> None:
        """Write into a file from an offset on; create it if it is missing. The disk begins to write at once."""

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

    # ---- A directory itself, whatever its name

    def hold(self, directory: Path) -> None:
        """Bind the path of a directory to this very directory until :meth:`release`, wherever it is moved to.

        That holds for what is done with it and with its files: ``write``, ``sync``, ``replace`` and ``remove_file``.
        Once the directory is removed they fail, also where another one has its name.
        """

    def release(self, directory: Path) -> None:
        """Unbind the path of a held directory."""


def is_present(storage: Storage, path: Path) -> bool:
    """Return whether something has this name, be it a symbolic link to nothing."""
    return storage.is_link(path) or storage.exists(path)


def leaves_under(storage: Storage, directory: Path) -> Iterator[tuple[Path, str]]:
    """Yield the files and links below a directory with their kind, in name order; links are not followed."""
    for entry in sorted(storage.entries(directory)):
        if entry.kind == "directory":
            yield from leaves_under(storage, directory / entry.name)
        else:
            yield directory / entry.name, entry.kind


def temporary_path(path: Path) -> Path:
    """Return where to write what is then renamed to a path; no other write has that name, in no process."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")


def is_temporary(name: str) -> bool:
    """Return whether a name is one of :func:`temporary_path`, also as earlier versions formed it."""
    return _TEMPORARY.fullmatch(name) is not None


def make_durable_directory(storage: Storage, directory: Path) -> None:
    """Create a directory and its parents, and force onto the disk that they exist.

    Parents that were there already may have been made a moment ago, by a framework that does not force them.
    """
    missing = list(itertools.takewhile(lambda each: not storage.exists(each), (directory, *directory.parents)))
    storage.make_directory(directory)
    for each in reversed(directory.parents):
        try:
            storage.sync(each)
        except PermissionError:  # a directory above may be closed to this user
            if each in {made.parent for made in missing}:
                raise


def write_atomically(storage: Storage, path: Path, content: bytes) -> None:
    """Replace a file durably, so that a crash leaves either the old or the new content."""
    temporary = temporary_path(path)
    storage.write(temporary, content)
    storage.sync(temporary)
    storage.replace(temporary, path)
    storage.sync(path.parent)


_HELD = (errno.EACCES, errno.EPERM, errno.EBUSY, errno.ENOTEMPTY)
"""What the system says of a file that is another user's, or that NFS keeps because somebody has it open."""


def unless_held(work: Callable[[], object]) -> OSError | None:
    """Move or remove something; what another start has removed at the same time is removed.

    Returns:
        The error where the disk works, and the system does not allow it; ``None``: it is done.
    """
    try:
        work()
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno not in _HELD:
            raise
        return error
    return None


def remove_tree(storage: Storage, directory: Path) -> OSError | None:
    """Remove a directory (or a file), files first, one operation at a time; the targets of symbolic links stay.

    What another start removes at the same time is removed.

    Returns:
        The first error of what cannot be removed; all the rest is removed nevertheless. ``None``: nothing is left.
    """
    if storage.is_link(directory) or not storage.is_directory(directory):
        return unless_held(functools.partial(storage.remove_file, directory))
    try:
        entries = sorted(storage.entries(directory))
    except FileNotFoundError:
        return None
    except PermissionError as error:
        return error
    held: OSError | None = None
    for entry in entries:
        path = directory / entry.name
        is_tree = entry.kind == "directory"
        found = remove_tree(storage, path) if is_tree else unless_held(functools.partial(storage.remove_file, path))
        held = held or found
    return held or unless_held(functools.partial(storage.remove_directory, directory))


_PIECE = 8 << 20
"""Bytes read at a time: many enough for few calls, few enough to count for nothing beside a checkpoint."""


def read_pieces(storage: Storage, path: Path) -> Iterator[bytes]:
    """Yield the content of a file from its begin to its end."""
    offset = 0
    while piece := storage.read_range(path, offset, _PIECE):
        yield piece
        offset += len(piece)


def write_pieces(storage: Storage, path: Path, pieces: Iterable[Bytes]) -> tuple[int, str]:
    """Create or replace a file; return its size and the XXH3-128 digest of what was written."""
    hasher, offset = xxhash.xxh3_128(), 0
    storage.write(path, b"")
    for piece in pieces:
        storage.write_range(path, offset, piece)
        hasher.update(piece)
        offset += len(piece)
    return offset, hasher.hexdigest()


CHANGES = {
    "write": 0,
    "write_range": 0,
    "append": 0,
    "sync": 0,
    "replace": 1,
    "symlink": 1,
    "make_directory": 0,
    "remove_file": 0,
    "remove_directory": 0,
}
"""The operations of a storage that change something, with the index of the argument that names the changed path."""


def counting_storage(storage: Storage, before: Callable[[Path], object]) -> Storage:
    """Return a storage that does what another one does.

    Args:
        storage: does the work.
        before: is called before each operation that changes something, with the path that it changes.
    """
    return cast("Storage", _CountingStorage(storage, before))


class _CountingStorage:
    def __init__(self, storage: Storage, before: Callable[[Path], object]) -> None:
        self._storage = storage
        self._before = before

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._storage, name)
        if name not in CHANGES:
            return operation

        def counted(*arguments: Any) -> Any:
            self._before(arguments[CHANGES[name]])
            return operation(*arguments)

        return counted


_SIZE = 1 << 20
"""Bytes that are written to find out. A disk that is full for a checkpoint may still have room for a small file."""

_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)

_FULL = (errno.ENOSPC, errno.EDQUOT)


def system_error(error: BaseException) -> OSError | None:
    """Return the first error with an errno among an error and those that it was raised from."""
    following: BaseException | None = error
    while following is not None:
        if isinstance(following, OSError) and following.errno is not None:
            return following
        following = following.__cause__ or following.__context__
    return None


def is_full(error: BaseException) -> bool:
    """Return whether an error comes from a disk or a quota that is full."""
    found = system_error(error)
    return found is not None and found.errno in _FULL


def find_disk_error(storage: Storage, directory: Path, error: BaseException) -> OSError | None:
    """Return the error of the disk behind an error; ``None`` if it has another reason.

    Some writers lose the errno: of a full disk, ``torch.save`` says "unexpected pos 64 vs 0". Then a file is written
    and forced onto the disk, to see what the system says.

    Args:
        storage: the file operations.
        directory: where the write failed.
        error: what was raised.
    """
    found = system_error(error)
    if found is not None:
        return found
    probe = directory / ".probe"
    try:
        storage.write(probe, bytes(_SIZE))
        storage.sync(probe)
    except OSError as refused:
        found = refused if refused.errno in _OF_THE_DISK else None
    with contextlib.suppress(OSError):  # it lies in a checkpoint that is abandoned
        storage.remove_file(probe)
    return found
