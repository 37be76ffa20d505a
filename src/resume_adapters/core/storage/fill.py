"""Fill the holes of files from memory, and digest what they then hold.

It is a module of the package, and a program: the process that writes staged saves runs this file. It imports neither
torch nor the package, so it starts in a tenth of a second and takes 15 MB.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import io
import json
import mmap
import os
import queue
import select
import signal
import socket
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple

import xxhash

_CHUNK = 1 << 22
"""Bytes that are written, or digested, between two looks at whether the trainer is alive."""

_AHEAD = 1 << 24
"""Bytes after which the disk begins to write: it works while the rest is copied, and less waits for it at the end."""

_SYNC_FILE_RANGE_WRITE = 2

_STRAIGHT = 1 << 20
"""Bytes from which on a part goes to the disk past the system's cache of files."""

_BLOCK = max(1 << 12, mmap.PAGESIZE)
"""Bytes of a block: what passes the cache begins and ends at one."""

_BUFFERS = 2
"""Chunks that are on their way to the disk at a time: one is copied while the other is written."""

_HEADER = struct.Struct("<Q")
"""The length of a message."""

_LOCAL_HEADER = 30
"""Bytes of a zip record's header, before its name."""

_SERIALIZATION_ID = ".data/serialization_id"

_WORD = (1 << 64) - 1


class Record(NamedTuple):
    """A record of an archive that ``torch.save`` has written.

    Attributes:
        name: the record's.
        begin, end: where the archive is in the file, by default all of it: ``torch.distributed.checkpoint`` writes one
            archive for each tensor.
    """

    name: str
    begin: int = 0
    end: int | None = None


class Piece(NamedTuple):
    """Bytes in memory, and the hole that they fill.

    Attributes:
        place: the hole's offset in the file, or its record.
        begin: offset in memory; ``None``: the hole is filled already.
        bytes: length.
    """

    place: int | Record
    begin: int | None
    bytes: int


def create_with_hole(path: Path, header: bytes, size: int) -> int:
    """Create a file that begins with a header and is a hole behind it; return a descriptor, for :func:`fill`."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        os.pwrite(descriptor, header, 0)
        os.ftruncate(descriptor, size)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_to_fill(path: Path) -> int:
    """Open a file that has holes; return a descriptor, for :func:`fill`."""
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


def is_removed(descriptor: int) -> bool:
    """Return whether an open file has no name any more."""
    return os.fstat(descriptor).st_nlink == 0


def leads_to(path: Path, descriptor: int) -> bool:
    """Return whether a path is that of an open file."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    return False


def scratch_file() -> IO[bytes]:
    """Return a file in memory that has a descriptor."""
    return open(os.memfd_create("resume-adapters"), "w+b")


def fill(
    descriptor: int, pieces: list[Piece], memory: memoryview, check: Callable[[], object] = bool
) -> tuple[int, str]:
    """Fill the holes of a file, force it onto the disk, and return its size and the XXH3-128 digest of its content.

    The digest is that of the bytes that were given: what is stored is not read again.

    Args:
        descriptor: the file, open for reading and writing.
        pieces: what fills the holes, all of them.
        memory: where the pieces are; not asked where the holes are filled already.
        check: is called now and then; it may raise to end the work.

    Raises:
        OSError: it could not be written.
        ValueError: the file is not what ``torch.save`` writes.
    """
    archives = _archives(descriptor, [each.place for each in pieces])
    offsets = [_offset(archives, each.place) for each in pieces]
    is_filled = pieces[0].begin is None
    if is_filled:
        memory = memoryview(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ))
    begins = offsets if is_filled else [each.begin or 0 for each in pieces]
    contents = [memory[begin : begin + each.bytes] for begin, each in zip(begins, pieces, strict=True)]
    parts = sorted(zip(offsets, contents, strict=True), key=lambda part: part[0])
    with ThreadPoolExecutor(1) as thread:  # checksums and digest take as long as the disk does
        writing = thread.submit(_write, descriptor, [] if is_filled else parts, check)
        sums: dict[_Archive, dict[str, int]] = {each: {} for each in archives.values()}
        for each, content in zip(pieces, contents, strict=True):
            if isinstance(each.place, Record):
                sums[archives[each.place.begin]][each.place.name] = _checksum(content, check)
        for archive, found in sums.items():
            archive.write_checksums(found)
        digest = _digest(descriptor, parts, check)
        writing.result()
    os.fsync(descriptor)
    return digest


def read_filled(descriptor: int, pieces: list[Piece], memory: memoryview) -> Iterator[memoryview]:
    """Yield the content of a file that :func:`fill` has filled, from its begin to its end.

    What has filled the holes comes from memory: it may have passed the system's cache of files, and would be read from
    the disk. An archive has its checksums by then.

    Args:
        descriptor: the file, open for reading.
        pieces: what has filled the holes, as far as it is in memory.
        memory: where the pieces are.

    Raises:
        OSError: it could not be read.
    """
    archives = _archives(descriptor, [each.place for each in pieces])
    contents = {_offset(archives, each.place): memory[each.begin or 0 :][: each.bytes] for each in pieces}
    size, at = os.fstat(descriptor).st_size, 0
    for offset, content in sorted([*contents.items(), (size, memoryview(b""))], key=lambda part: part[0]):
        while at < offset and (read := os.pread(descriptor, min(offset - at, _CHUNK), at)):
            at += len(read)
            yield memoryview(read)
        yield from _chunks(content, bool)
        at = offset + len(content)


def fill_holes(descriptor: int, contents: Mapping[int | Record, memoryview]) -> None:
    """Fill all holes of a file, and leave its checksums, its digest and the disk to :func:`fill`.

    Args:
        descriptor: the file, open for reading and writing.
        contents: what fills the holes, by their places; see :class:`Piece`.

    Raises:
        OSError: it could not be written.
        ValueError: the file is not what ``torch.save`` writes.
    """
    archives = _archives(descriptor, contents)
    offsets = {_offset(archives, place): content for place, content in contents.items()}
    _write_parts(descriptor, sorted(offsets.items(), key=lambda part: part[0]), bool)


def _archives(descriptor: int, places: Iterable[int | Record]) -> dict[int, _Archive]:
    """Return the archives that hold these places, by their offsets in the file."""
    spans = {each.begin: each.end for each in places if isinstance(each, Record)}
    return {begin: _Archive(descriptor, begin, end) for begin, end in spans.items()}


def _offset(archives: Mapping[int, _Archive], place: int | Record) -> int:
    return archives[place.begin].begin(place.name) if isinstance(place, Record) else place


def _chunks(content: memoryview, check: Callable[[], object]) -> Iterator[memoryview]:
    for begin in range(0, len(content), _CHUNK):
        check()
        yield content[begin : begin + _CHUNK]


def _write(descriptor: int, parts: list[tuple[int, memoryview]], check: Callable[[], object]) -> None:
    with _passing_cache(descriptor) as passing:
        if passing is None:
            _write_parts(descriptor, parts, check)
        else:
            _write_past_cache(descriptor, passing, parts, check)
    os.fdatasync(descriptor)


@contextlib.contextmanager
def _passing_cache(descriptor: int) -> Iterator[int | None]:
    """Return a descriptor of the file whose writes pass the system's cache of files; ``None`` where there is none.

    Nobody reads the files soon, and their content is in memory already: a second copy there would take as much memory
    again, from the training and from the data that it reads, and as much time as the disk takes. Only of a file system
    on a disk of this machine is it known that such writes are fast: the device of all others has the number 0.
    """
    passing = None
    if os.major(os.fstat(descriptor).st_dev):
        with contextlib.suppress(OSError):  # the file system has no such writes
            passing = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0))
    try:
        yield passing
    finally:
        if passing is not None:
            os.close(passing)


def _write_past_cache(
    descriptor: int, passing: int, parts: list[tuple[int, memoryview]], check: Callable[[], object]
) -> None:
    """Write the blocks of large parts past the cache, and the rest through it: no block has bytes of both."""
    buffers: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
    for _ in range(_BUFFERS):
        buffers.put(memoryview(mmap.mmap(-1, _CHUNK)))  # begins at a page of memory

    def write(offset: int, chunk: memoryview) -> None:
        check()
        buffer = buffers.get()
        try:
            buffer[: len(chunk)] = chunk
            _write_blocks(descriptor, passing, buffer[: len(chunk)], offset)
        finally:
            buffers.put(buffer)

    rest, writing = [], []
    with ThreadPoolExecutor(_BUFFERS) as threads:
        for begin, content in parts:
            first = min(-begin % _BLOCK, len(content))
            last = len(content) - (begin + len(content)) % _BLOCK
            if last - first < _STRAIGHT:
                rest.append((begin, content))
                continue
            rest += [(begin, content[:first]), (begin + last, content[last:])]
            blocks = range(first, last, _CHUNK)
            writing += [threads.submit(write, begin + at, content[at : min(at + _CHUNK, last)]) for at in blocks]
        for each in writing:
            each.result()
    _write_parts(descriptor, rest, check)


def _write_blocks(descriptor: int, passing: int, blocks: memoryview, offset: int) -> None:
    while blocks:
        try:
            written = os.pwrite(passing, blocks, offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            written = os.pwrite(descriptor, blocks, offset)  # the disk wants larger blocks
        offset, blocks = offset + written, blocks[written:]


def _write_parts(descriptor: int, parts: list[tuple[int, memoryview]], check: Callable[[], object]) -> None:
    begun = 0
    for begin, content in parts:
        offset = begin
        for each in _chunks(content, check):
            chunk = each
            while chunk:
                written = os.pwrite(descriptor, chunk, offset)
                offset, chunk = offset + written, chunk[written:]
            if offset - begun >= _AHEAD:
                let_disk_begin(descriptor, begun, offset - begun)
                begun = offset


@functools.cache
def _sync_file_range() -> Callable[[int, int, int, int], int]:
    found: Any = getattr(ctypes.CDLL(None), "sync_file_range", lambda *_: 0)  # of Linux alone
    found.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return found  # type: ignore[no-any-return]


def let_disk_begin(descriptor: int, begin: int, size: int) -> None:
    """Let the disk begin to write a part of a file. Nothing waits for it, and an error shows in the ``fsync``."""
    _sync_file_range()(descriptor, begin, size, _SYNC_FILE_RANGE_WRITE)


def _checksum(content: memoryview, check: Callable[[], object]) -> int:
    found = 0
    for chunk in _chunks(content, check):
        found = zlib.crc32(chunk, found)
    return found


def _digest(descriptor: int, parts: list[tuple[int, memoryview]], check: Callable[[], object]) -> tuple[int, str]:
    last, content = parts[-1]
    end = max(os.fstat(descriptor).st_size, last + len(content))
    hasher, at = xxhash.xxh3_128(), 0
    for offset, content in [*parts, (end, memoryview(b""))]:
        for begin in range(at, offset, _CHUNK):
            hasher.update(os.pread(descriptor, min(_CHUNK, offset - begin), begin))
        for chunk in _chunks(content, check):
            hasher.update(chunk)
        at = offset + len(content)
    return end, hasher.hexdigest()


class _Slice(io.RawIOBase):
    """A part of a file, as a file that can be read.

    Args:
        descriptor: the whole file.
        begin, end: where the part is.
    """

    def __init__(self, descriptor: int, begin: int, end: int) -> None:
        self._descriptor = descriptor
        self._begin = begin
        self._end = end
        self._at = begin

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to an offset; see :meth:`io.IOBase.seek`."""
        self._at = offset + {os.SEEK_SET: self._begin, os.SEEK_CUR: self._at, os.SEEK_END: self._end}[whence]
        if self._at < self._begin:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return self._at - self._begin

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer, and return how many bytes."""
        content = os.pread(self._descriptor, min(len(buffer), self._end - self._at), self._at)
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)


class _Archive:
    """The zip that ``torch.save`` writes, with holes for the content of some records.

    Args:
        descriptor: the file.
        begin, end: where the archive is in the file.

    Raises:
        ValueError: it is no such archive.
    """

    def __init__(self, descriptor: int, begin: int, end: int | None) -> None:
        self._descriptor = descriptor
        self._begin = begin
        self._end = os.fstat(descriptor).st_size if end is None else end
        try:
            with zipfile.ZipFile(_Slice(descriptor, begin, self._end)) as archive:
                self._infos = {each.filename.partition("/")[2]: each for each in archive.infolist()}
                self._directory = begin + archive.start_dir
        except zipfile.BadZipFile as error:
            raise ValueError(str(error)) from error

    def begin(self, record: str) -> int:
        """Return the offset of a record's content."""
        header = self._begin + self._infos[record].header_offset
        name, extra = struct.unpack_from("<HH", os.pread(self._descriptor, _LOCAL_HEADER, header), 26)
        return header + _LOCAL_HEADER + int(name) + int(extra)

    def write_checksums(self, checksums: dict[str, int]) -> None:
        """Write the CRC-32 of records that were filled, and the id that torch makes of those of all records."""
        directory = bytearray(os.pread(self._descriptor, self._end - self._directory, self._directory))
        at, combined = 0, 0
        for name, info in self._infos.items():
            begin, length = self.begin(name), info.file_size
            found = checksums.get(name, info.CRC)
            if name == _SERIALIZATION_ID:
                text = os.pread(self._descriptor, length, begin)[:20] + b"%020d" % combined
                os.pwrite(self._descriptor, text, begin)
                found = zlib.crc32(text)
            if found != info.CRC:  # it is in the directory, and behind the content and a mark
                struct.pack_into("<I", directory, at + 16, found)
                os.pwrite(self._descriptor, struct.pack("<I", found), begin + length + 4)
            at += 46 + sum(struct.unpack_from("<HHH", directory, at + 28))
            if length:  # as c10's hash_combine does, over the records in their order
                combined ^= (found + 0x9E3779B9 + (combined << 6 & _WORD) + (combined >> 2)) & _WORD
        os.pwrite(self._descriptor, directory, self._directory)


# ---- The program


def send(channel: socket.socket, descriptor: int, pieces: list[Piece]) -> None:
    """Ask the process at the other end of a socket to fill a file."""
    body = json.dumps(pieces).encode()
    socket.send_fds(channel, [_HEADER.pack(len(body))], [descriptor])
    channel.sendall(body)


def receive(channel: socket.socket, require_alive: Callable[[], object]) -> tuple[int, str]:
    """Return what :func:`fill` returned in the process at the other end of a socket.

    Args:
        channel: the socket.
        require_alive: raises if the process has died: another one may hold its end of the socket open.

    Raises:
        OSError: it could not write.
        EOFError: the process has died.
    """
    while not select.select([channel], [], [], 1.0)[0]:
        require_alive()
    length = _receive_exactly(channel, _HEADER.size)
    answer = json.loads(_receive_exactly(channel, _HEADER.unpack(length)[0]))
    if "errno" in answer:
        raise OSError(answer["errno"], os.strerror(answer["errno"]))
    return answer["size"], answer["digest"]


def _place(sent: Any) -> int | Record:
    return Record(*sent) if isinstance(sent, list) else sent


def _receive_exactly(channel: socket.socket, size: int) -> bytes:
    received = channel.recv(size, socket.MSG_WAITALL)
    if len(received) < size:
        raise EOFError("the other end has closed the socket")
    return received


def _serve(channel: socket.socket, memory: memoryview, trainer: int) -> None:
    """Fill files until the trainer closes its end of the socket, or is gone."""

    def require_trainer() -> None:
        if os.getppid() != trainer:
            raise SystemExit

    while True:
        while not select.select([channel], [], [], 1.0)[0]:  # a child of the trainer may hold its end open
            require_trainer()
        header, descriptors, _, _ = socket.recv_fds(channel, _HEADER.size, 1)
        if not header:
            return
        try:
            asked = json.loads(_receive_exactly(channel, _HEADER.unpack(header)[0]))
            pieces = [Piece(_place(place), *rest) for place, *rest in asked]
            written, digest = fill(descriptors[0], pieces, memory, require_trainer)
            answer: dict[str, object] = {"size": written, "digest": digest}
        except OSError as error:
            answer = {"errno": error.errno}
        finally:
            os.close(descriptors[0])
        body = json.dumps(answer).encode()
        channel.sendall(_HEADER.pack(len(body)) + body)


def main() -> None:
    """Serve one trainer: the arguments are the descriptors of the socket and the memory, its size, and the trainer."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(each, signal.SIG_IGN)  # a scheduler sends them to all processes of a job; the trainer decides
    os.nice(10)
    connection, descriptor, size, trainer = map(int, sys.argv[1:])
    for other in map(int, os.listdir("/proc/self/fd")):
        if other > max(connection, descriptor):  # what libraries let every program inherit
            with contextlib.suppress(OSError):
                os.close(other)
    memory = mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
    with socket.socket(fileno=connection) as channel:
        _serve(channel, memoryview(memory), trainer)


if __name__ == "__main__":
    main()
