"""Fill the holes of files from memory, and digest what they then hold.

It is a module of the package, and a program: the process that writes staged saves runs this file. It imports neither
torch nor the package, so it starts in a tenth of a second and takes 15 MB.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import signal
import socket
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, NamedTuple

import xxhash

_CHUNK = 1 << 22
"""Bytes that are written, or digested, between two looks at whether the trainer is alive."""

_HEADER = struct.Struct("<Q")
"""The length of a message."""

_LOCAL_HEADER = 30
"""Bytes of a zip record's header, before its name."""

_SERIALIZATION_ID = ".data/serialization_id"

_WORD = (1 << 64) - 1


class Piece(NamedTuple):
    """Bytes in memory, and the hole that they fill.

    Attributes:
        place: the hole's offset in the file; in a file of ``torch.save``, the name of its record.
        begin: offset in memory.
        bytes: length.
    """

    place: int | str
    begin: int
    bytes: int


class _Span(NamedTuple):
    offset: int
    begin: int
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
        pieces: what fills the holes, all of them: offsets, or names of records of ``torch.save``.
        memory: where the pieces are.
        check: is called now and then; it may raise to end the work.

    Raises:
        OSError: it could not be written.
        ValueError: the file is not what ``torch.save`` writes.
    """
    archive = _Archive(descriptor) if isinstance(pieces[0].place, str) else None
    spans = sorted(
        _Span(each.place if isinstance(each.place, int) else archive.begin(each.place), each.begin, each.bytes)  # type: ignore[union-attr]
        for each in pieces
    )
    with ThreadPoolExecutor(1) as thread:  # a checksum takes as long as the write, and the disk works meanwhile
        writing = thread.submit(_write, descriptor, spans, memory, check)
        if archive is not None:
            checksums = {str(each.place): _checksum(memory, each, check) for each in pieces}
        writing.result()
    if archive is not None:
        archive.write_checksums(checksums)
    found = _digest(descriptor, spans, memory, check)
    os.fsync(descriptor)
    return found


def _chunks(memory: memoryview, begin: int, size: int, check: Callable[[], object]) -> Iterator[memoryview]:
    for offset in range(begin, begin + size, _CHUNK):
        check()
        yield memory[offset : min(offset + _CHUNK, begin + size)]


def _write(descriptor: int, spans: list[_Span], memory: memoryview, check: Callable[[], object]) -> None:
    for span in spans:
        offset = span.offset
        for chunk in _chunks(memory, span.begin, span.bytes, check):
            while chunk:
                written = os.pwrite(descriptor, chunk, offset)
                offset, chunk = offset + written, chunk[written:]
    os.fdatasync(descriptor)


def _checksum(memory: memoryview, piece: Piece, check: Callable[[], object]) -> int:
    found = 0
    for chunk in _chunks(memory, piece.begin, piece.bytes, check):
        found = zlib.crc32(chunk, found)
    return found


def _digest(descriptor: int, spans: list[_Span], memory: memoryview, check: Callable[[], object]) -> tuple[int, str]:
    size = os.fstat(descriptor).st_size
    hasher, at = xxhash.xxh3_128(), 0
    for span in [*spans, _Span(size, 0, 0)]:
        hasher.update(os.pread(descriptor, span.offset - at, at))
        for chunk in _chunks(memory, span.begin, span.bytes, check):
            hasher.update(chunk)
        at = span.offset + span.bytes
    return size, hasher.hexdigest()


class _Archive:
    """The zip that ``torch.save`` writes, with holes for the content of some records.

    Args:
        descriptor: the file.

    Raises:
        ValueError: it is no such file.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        try:
            with open(descriptor, "rb", closefd=False) as file, zipfile.ZipFile(file) as archive:
                self._infos = {each.filename.partition("/")[2]: each for each in archive.infolist()}
                self._directory = archive.start_dir
        except zipfile.BadZipFile as error:
            raise ValueError(str(error)) from error

    def begin(self, record: str) -> int:
        """Return the offset of a record's content."""
        header = self._infos[record].header_offset
        name, extra = struct.unpack_from("<HH", os.pread(self._descriptor, _LOCAL_HEADER, header), 26)
        return header + _LOCAL_HEADER + int(name) + int(extra)

    def write_checksums(self, checksums: dict[str, int]) -> None:
        """Write the CRC-32 of records that were filled, and the id that torch makes of those of all records."""
        size = os.fstat(self._descriptor).st_size
        directory = bytearray(os.pread(self._descriptor, size - self._directory, self._directory))
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


def receive(channel: socket.socket) -> tuple[int, str]:
    """Return what :func:`fill` returned in the process at the other end of a socket.

    Raises:
        OSError: it could not write.
        EOFError: the process has died.
    """
    length = _receive_exactly(channel, _HEADER.size)
    answer = json.loads(_receive_exactly(channel, _HEADER.unpack(length)[0]))
    if "errno" in answer:
        raise OSError(answer["errno"], os.strerror(answer["errno"]))
    return answer["size"], answer["digest"]


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
            size, digest = fill(descriptors[0], [Piece(*each) for each in asked], memory, require_trainer)
            answer: dict[str, object] = {"size": size, "digest": digest}
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
    memory = mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
    with socket.socket(fileno=connection) as channel:
        _serve(channel, memoryview(memory), trainer)


if __name__ == "__main__":
    main()
