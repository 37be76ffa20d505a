"""The local disk, or a file system that is mounted like one."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import io
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import xxhash

from resume_adapters.core.storage.base import Bytes, Entry, Stamp

_CHUNK = 1 << 19
"""Bytes read and hashed at a time: large enough for few calls, small enough for a core's caches."""


_BLOCK = 512
"""Bytes of what ``stat`` calls a block, on every file system."""

LARGEST_DOCUMENT = 1 << 28
"""Bytes of the largest file that is read as a whole: a manifest, a journal, or the JSON of a part."""

_SYNC_FILE_RANGE_WRITE = 2

_LEADS_NOWHERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
"""What the system says of a path that leads to nothing, or can lead to nothing."""


@functools.cache
def _sync_file_range() -> Callable[[int, int, int, int], int]:
    found: Any = getattr(ctypes.CDLL(None), "sync_file_range", lambda *_: 0)  # of Linux alone
    found.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return found  # type: ignore[no-any-return]


class LocalStorage:
    """A :class:`~resume_adapters.core.storage.base.Storage` on a mounted file system, local or shared."""

    def __init__(self) -> None:
        self._held: dict[Path, int] = {}

    def _at(self, path: Path) -> tuple[Path | str, int | None]:
        """Return a path and the descriptor that it is relative to: that of the directory, where it is held."""
        held = self._held.get(path.parent)
        return (path, None) if held is None else (path.name, held)

    def _open(self, path: Path, flags: int) -> io.FileIO:
        """Open a regular file, and nothing else: a pipe would wait for ever, a device has no end.

        Raises:
            OSError: it cannot be opened, or is not a regular file.
        """
        name, held = self._at(path)

        def opener(whole: str, of_mode: int) -> int:
            descriptor = os.open(name, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666, dir_fd=held)
            try:
                _require_regular(path, os.fstat(descriptor))
            except BaseException:
                os.close(descriptor)
                raise
            return descriptor

        # An auditor of this process sees the whole path, and not the name in a directory that is held.
        return io.FileIO(str(path), "r" if flags & os.O_ACCMODE == os.O_RDONLY else "w", opener=opener)

    def exists(self, path: Path) -> bool:
        return os.path.exists(path)  # pathlib takes twice as long, and a start asks ten thousands of times

    def is_file(self, path: Path) -> bool:
        return os.path.isfile(path)

    def is_directory(self, path: Path) -> bool:
        return os.path.isdir(path)

    def is_link(self, path: Path) -> bool:
        return os.path.islink(path)

    def read_link(self, path: Path) -> str:
        return os.readlink(path)

    def real_path(self, path: Path) -> Path:
        while True:
            with contextlib.suppress(FileNotFoundError):  # a link went while it was followed: what is there now?
                return Path(os.path.realpath(path))

    def size(self, path: Path) -> int:
        status = os.stat(path)
        _require_regular(path, status)
        return status.st_size

    def free_bytes(self, path: Path) -> int:
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def stamp(self, path: Path) -> Stamp | None:
        try:
            found = os.stat(path)
        except OSError as error:
            if error.errno in _LEADS_NOWHERE:
                return None
            raise
        return Stamp(found.st_ino, found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else None

    def entries(self, path: Path) -> list[Entry]:
        with os.scandir(path) as entries:
            return [Entry(entry.name, _kind(entry)) for entry in entries]

    def read(self, path: Path) -> bytes:
        with self._open(path, os.O_RDONLY) as file:
            if os.fstat(file.fileno()).st_size > LARGEST_DOCUMENT:
                raise OSError(errno.EFBIG, f"has more than {LARGEST_DOCUMENT} bytes", str(path))
            return file.readall()

    def read_range(self, path: Path, offset: int, count: int) -> bytes:
        with self._open(path, os.O_RDONLY) as file:
            file.seek(offset)
            return file.read(count)

    def digest(self, path: Path, *, skip_holes: bool = False) -> tuple[int, str]:
        hasher, size = xxhash.xxh3_128(), 0
        with self._open(path, os.O_RDONLY) as file:
            found = os.fstat(file.fileno())
            buffer = bytearray(min(_CHUNK, found.st_size + 1))
            view, zeros = memoryview(buffer), memoryview(bytes(len(buffer)))
            has_holes = skip_holes and found.st_blocks * _BLOCK < found.st_size
            while size <= found.st_size:  # another process may append without end
                hole = _hole_at(file, size, found.st_size) if has_holes else 0
                for done in range(0, hole, len(zeros)):
                    hasher.update(zeros[: hole - done])
                size += hole
                if not (count := file.readinto(buffer)):
                    break
                hasher.update(view[:count])
                size += count
        return size, hasher.hexdigest()

    def write(self, path: Path, content: bytes) -> None:
        with self._open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW) as file:
            _write_all(file, content)

    def write_range(self, path: Path, offset: int, content: Bytes) -> None:
        with self._open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW) as file:
            file.seek(offset)
            _write_all(file, content)
            # A file that is written piece by piece is large. Left to the system, its pages fill the cache until all
            # writers have to wait.
            _sync_file_range()(file.fileno(), offset, len(content), _SYNC_FILE_RANGE_WRITE)

    def append(self, path: Path, content: bytes) -> None:
        with self._open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW) as file:
            _write_all(file, content)

    def sync(self, path: Path) -> None:
        if path in self._held:
            os.fsync(self._held[path])
            return
        name, held = self._at(path)
        descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK, dir_fd=held)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def replace(self, source: Path, target: Path) -> None:
        (old, source_held), (new, target_held) = self._at(source), self._at(target)
        os.replace(old, new, src_dir_fd=source_held, dst_dir_fd=target_held)

    def symlink(self, target: str, link: Path) -> bool:
        try:
            os.symlink(target, link)
        except OSError as error:
            if error.errno in (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP):
                return False
            raise
        return True

    def make_directory(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def remove_file(self, path: Path) -> None:
        name, held = self._at(path)
        os.remove(name, dir_fd=held)

    def remove_directory(self, path: Path) -> None:
        path.rmdir()

    def hold(self, directory: Path) -> None:
        self._held[directory] = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)

    def release(self, directory: Path) -> None:
        os.close(self._held.pop(directory))


def _require_regular(path: Path, status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "is not a regular file", str(path))


def _hole_at(file: io.FileIO, at: int, end: int) -> int:
    """Go to the next bytes that are stored; return how many zeros lie before them, which take no place on the disk."""
    try:
        return os.lseek(file.fileno(), at, os.SEEK_DATA) - at
    except OSError as error:  # nothing more is stored, or the file system knows no holes
        return os.lseek(file.fileno(), end, os.SEEK_SET) - at if error.errno == errno.ENXIO else 0


def _write_all(file: io.FileIO, content: Bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[file.write(view) :]


def _kind(entry: os.DirEntry[str]) -> Literal["file", "directory", "link", "other"]:
    if entry.is_symlink():
        return "link"
    if entry.is_dir():
        return "directory"
    return "file" if entry.is_file() else "other"


def make_private_directory(path: Path) -> None:
    """Create a directory that no other user can enter; one that exists is used if it is this user's own.

    Args:
        path: the directory; its parent exists.

    Raises:
        PermissionError: what has the name is another user's, a link, no directory, or open to others.
        OSError: it cannot be created.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    found = os.lstat(path)
    what = (
        "a link"
        if stat.S_ISLNK(found.st_mode)
        else "not a directory"
        if not stat.S_ISDIR(found.st_mode)
        else f"of the user {found.st_uid}, and this process runs as {os.geteuid()}"
        if found.st_uid != os.geteuid()
        else f"open to other users (mode {stat.S_IMODE(found.st_mode):o}, expected 700)"
        if found.st_mode & 0o077
        else ""
    )
    if what:
        raise PermissionError(errno.EACCES, f"it is {what}: remove it, or name another directory", str(path))


_SPARE = 64
"""Descriptors that these files leave to everything else."""


class OpenFile:
    """A file by its descriptor, whatever its name becomes.

    Args:
        descriptor: the file, open for writing; closed by :meth:`close`.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def create(cls, path: Path) -> OpenFile:
        """Create a file, or empty the one that is there, as ``open(path, "wb")`` does."""
        return cls(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666))

    @classmethod
    def same_as(cls, descriptor: int) -> OpenFile:
        """Open a file once more that somebody has open."""
        return cls(os.dup(descriptor))

    @property
    def leaves_enough(self) -> bool:
        """Whether the process can open enough files beside this one."""
        import resource  # Windows has none

        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return most == resource.RLIM_INFINITY or self._descriptor < most - _SPARE  # it is the lowest that was free

    @property
    def is_removed(self) -> bool:
        """Whether the file has no name any more."""
        return os.fstat(self._descriptor).st_nlink == 0

    def has_name(self, path: Path) -> bool:
        """Return whether a path leads to this file."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.stat(path), os.fstat(self._descriptor))
        return False

    def extend(self, size: int) -> None:
        """Give the file a size, if it is smaller; what is missing takes no room on the disk."""
        if os.fstat(self._descriptor).st_size < size:
            os.ftruncate(self._descriptor, size)

    def write(self, offset: int, content: Bytes) -> None:
        """Write into the file from an offset on."""
        view = memoryview(content)
        while view:
            written = os.pwrite(self._descriptor, view, offset)
            offset, view = offset + written, view[written:]

    def close(self) -> None:
        """Close it."""
        os.close(self._descriptor)
