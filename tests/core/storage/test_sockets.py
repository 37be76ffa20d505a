"""The connections of a process are found, and ended on one side alone."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from resume_adapters.core.storage.sockets import Connection, OpenSocket, open_sockets


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both sides of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        here = socket.create_connection(listening.getsockname())
        there, _ = listening.accept()
    with here, there:
        yield here, there


def of(found: socket.socket) -> OpenSocket:
    return OpenSocket(found.fileno(), os.fstat(found.fileno()).st_ino)


def test_one_side_reads_its_end_and_both_can_still_write(pair: tuple[socket.socket, socket.socket]) -> None:
    here, there = pair
    assert of(here) in open_sockets()
    connection = Connection.of(of(here))
    assert connection is not None and connection.is_idle()
    connection.end_reading()
    connection.end_reading()
    assert here.recv(1) == b""
    here.sendall(b"x")
    assert there.recv(1) == b"x"
    here.close()
    there.sendall(b"y")
    there.sendall(b"y")  # nobody has closed the connection
    connection.close()
    assert of(there) in open_sockets()


def test_what_is_on_its_way_is_seen(pair: tuple[socket.socket, socket.socket], monkeypatch: Any) -> None:
    here, there = pair
    connection = Connection.of(of(here))
    assert connection is not None
    there.sendall(b"x")
    here.recv(1, socket.MSG_PEEK)
    assert not connection.is_idle()
    here.recv(1)
    assert connection.is_idle()

    def refuse(*_: object) -> bytes:
        raise OSError

    monkeypatch.setattr(fcntl, "ioctl", refuse)
    assert connection.is_idle(), "where the system does not tell"
    connection.close()


def test_what_is_closed_listens_or_is_of_another_kind_is_no_connection(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    here, there = pair
    found = of(here)
    assert Connection.of(OpenSocket(found.descriptor, found.inode + 1)) is None
    here.close()
    assert Connection.of(found) is None
    with socket.create_server(("127.0.0.1", 0)) as listening:
        assert Connection.of(of(listening)) is None
    one, other = socket.socketpair()
    with one, other:
        assert Connection.of(of(one)) is None
    ended = Connection.of(of(there))
    assert ended is not None
    there.recv(1)
    there.shutdown(socket.SHUT_RDWR)
    ended.end_reading()
    ended.close()
