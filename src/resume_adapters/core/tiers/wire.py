"""One file from one process to another over TCP: both sides show that they have the token, and a digest ends the file.

::

    server -> client    the magic words, a challenge
    client -> server    a challenge, the request and its MAC
    server -> client    the header and its MAC, the content, the MAC of the content's digest

A MAC is an HMAC-SHA256, with the token of the start as its key, of what kind of message it is, both challenges and the
message. So nobody gets a byte without the token, what was overheard cannot be sent again, and a file that was cut off
or has changed on the way is refused. Requests and headers are JSON of a fixed form, and nothing that arrives is
executed. The content is not encrypted, like the training's own messages.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
import xxhash

from resume_adapters.errors import CheckpointDamaged, ResumeError, TierUnavailable

_MAGIC = b"resume-adapters peer 1\n"

_CHALLENGE = _MAC = 32
"""Bytes of a challenge, and of a MAC."""

_LONGEST_MESSAGE = 1 << 16
"""Bytes of a request or a header, at most."""

_PIECE = 1 << 20
"""Bytes received at a time."""

PATIENCE = 10.0
"""Seconds in which the other side has to show that it has the token, and from then on to send or take something."""


class Request(msgspec.Struct, frozen=True):
    """A file that a client asks for.

    Attributes:
        holder: the node that is asked, by its first rank.
        root: which of its directories; empty for what its own ranks have saved.
        name: the checkpoint.
        path: the file, as the manifest names it; empty for the manifest itself.
    """

    holder: int
    root: str
    name: str
    path: str = ""


class _Header(msgspec.Struct, frozen=True):
    """What comes: so many bytes, or none and the problem."""

    holder: int
    bytes: int = 0
    problem: str = ""


# Made here, once: msgspec crashes where two threads are the first to decode the same class.
_decode_request = msgspec.json.Decoder(Request).decode
_decode_header = msgspec.json.Decoder(_Header).decode


@dataclass(frozen=True)
class Content:
    """A file that a server has: its size in bytes, and its content in pieces."""

    size: int
    pieces: Iterator[bytes]


class _Line:
    """A connection of which both challenges are known.

    Args:
        connection: the connection.
        token: of this start.
        challenges: of both sides.
        ends: when the other side must have shown that it has the token.
    """

    def __init__(self, connection: socket.socket, token: bytes, challenges: bytes, ends: float) -> None:
        self._connection = connection
        self._token = token
        self._challenges = challenges
        self._ends = ends

    def mac(self, kind: bytes, message: bytes) -> bytes:
        """Return the MAC of a message."""
        return hmac.digest(self._token, kind + self._challenges + message, "sha256")

    def send(self, kind: bytes, message: bytes) -> None:
        """Send a request or a header."""
        assert len(message) <= _LONGEST_MESSAGE, "names and reasons are short"
        self._connection.sendall(len(message).to_bytes(4, "big") + message + self.mac(kind, message))

    def receive(self, kind: bytes) -> bytes:
        """Receive a request or a header.

        Raises:
            TierUnavailable: it is too long, or its MAC is another one.
        """
        count = int.from_bytes(_receive(self._connection, 4, self._ends), "big")
        if count > _LONGEST_MESSAGE:
            raise TierUnavailable(f"a message has {count} bytes, expected at most {_LONGEST_MESSAGE}")
        message = _receive(self._connection, count, self._ends)
        self.require(kind, message, "it has another token", self._ends)
        self._connection.settimeout(PATIENCE)
        return message

    def require(self, kind: bytes, message: bytes, otherwise: str, ends: float | None = None) -> None:
        """Receive the MAC of a message, and compare it.

        Args:
            kind: of the message.
            message: what was received.
            otherwise: what it means where the MAC is another one.
            ends: when it must be here; by default it may take as long as each piece of the content.

        Raises:
            TierUnavailable: it is another one.
        """
        if not hmac.compare_digest(_receive(self._connection, _MAC, ends), self.mac(kind, message)):
            raise TierUnavailable(f"the other side cannot be trusted: {otherwise}")


def _receive(connection: socket.socket, count: int, ends: float | None = None) -> bytes:
    """Receive exactly so many bytes.

    Args:
        connection: the connection.
        count: how many bytes.
        ends: when all of them must be here; by default only the next piece is waited for.

    Raises:
        TierUnavailable: the connection ends before that.
        TimeoutError: they are not here in time.
    """
    return b"".join(_receive_pieces(connection, count, ends))


def _receive_pieces(connection: socket.socket, count: int, ends: float | None = None) -> Iterator[bytes]:
    left = count
    while left:
        if ends is not None:
            connection.settimeout(max(ends - time.monotonic(), 1e-3))  # zero would not wait at all
        piece = connection.recv(min(left, _PIECE))
        if not piece:
            raise TierUnavailable(f"the connection ended {left} bytes too early")
        left -= len(piece)
        yield piece


def answer(connection: socket.socket, token: bytes, holder: int, find: Callable[[Request], Content]) -> None:
    """Answer the one request of a client.

    Args:
        connection: the client; the caller closes it.
        token: of this start.
        holder: this node, by its first rank.
        find: returns a file; raises :class:`CheckpointDamaged` where there is none that can be used.

    Raises:
        TierUnavailable: the client has another token, or is no client.
        OSError: the connection failed.
    """
    connection.settimeout(PATIENCE)
    ends = time.monotonic() + PATIENCE
    challenge = secrets.token_bytes(_CHALLENGE)
    connection.sendall(_MAGIC + challenge)
    line = _Line(connection, token, challenge + _receive(connection, _CHALLENGE, ends), ends)
    request = _decode_request(line.receive(b"request"))
    try:
        found = find(request)
    except CheckpointDamaged as error:
        line.send(b"header", msgspec.json.encode(_Header(holder, problem=error.message)))
        return
    line.send(b"header", msgspec.json.encode(_Header(holder, found.size)))
    hasher = xxhash.xxh3_128()
    for piece in found.pieces:
        connection.sendall(piece)
        hasher.update(piece)
    connection.sendall(line.mac(b"digest", hasher.digest()))


def ask(address: tuple[str, int], token: bytes, request: Request) -> Iterator[bytes]:
    """Yield the content of a file that a server has; it can be used once the last piece was yielded.

    Args:
        address: of the server.
        token: of this start.
        request: the file.

    Raises:
        TierUnavailable: the server does not answer, or another one has that address; or what came was cut off, or has
            changed on the way.
        CheckpointDamaged: the server has no such file.
    """
    try:
        yield from _ask(address, token, request)
    except OSError as error:
        if isinstance(error, ResumeError):
            raise
        raise TierUnavailable(f"{address[0]} port {address[1]}: {error}") from error


def _ask(address: tuple[str, int], token: bytes, request: Request) -> Iterator[bytes]:
    with socket.create_connection(address, timeout=PATIENCE) as connection:
        ends = time.monotonic() + PATIENCE
        if _receive(connection, len(_MAGIC), ends) != _MAGIC:
            raise TierUnavailable("the other side is no peer of this run")
        theirs, mine = _receive(connection, _CHALLENGE, ends), secrets.token_bytes(_CHALLENGE)
        connection.sendall(mine)
        line = _Line(connection, token, theirs + mine, ends)
        line.send(b"request", msgspec.json.encode(request))
        header = _decode_header(line.receive(b"header"))
        if header.holder != request.holder:
            raise TierUnavailable(f"the other side is the node of rank {header.holder}")
        if header.problem:
            raise CheckpointDamaged(header.problem)
        hasher = xxhash.xxh3_128()
        for piece in _receive_pieces(connection, header.bytes):
            hasher.update(piece)
            yield piece
        line.require(b"digest", hasher.digest(), "what came has changed on the way")
