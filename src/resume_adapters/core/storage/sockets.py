"""The connections that this process has open: found among its descriptors, and ended."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from typing import NamedTuple


class OpenSocket(NamedTuple):
    """A socket of this process. A descriptor is given out again once it is closed; the inode is another one then."""

    descriptor: int
    inode: int


def open_sockets() -> set[OpenSocket]:
    """Return the sockets of this process, of any kind."""
    found = set()
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # it has been closed meanwhile
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found.add(OpenSocket(int(name), status.st_ino))
    return found


class Connection:
    """A connection over a network, which is held open beside what has made it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    @classmethod
    def of(cls, found: OpenSocket) -> Connection | None:
        """Hold a socket open; return ``None`` for one that has no peer (yet), is of another kind, or is closed."""
        try:
            copy = os.dup(found.descriptor)  # the descriptor may be closed, and given out again, at any time
        except OSError:
            return None
        status = os.fstat(copy)
        if not stat.S_ISSOCK(status.st_mode) or status.st_ino != found.inode:
            os.close(copy)
            return None
        connection = socket.socket(fileno=copy)
        with contextlib.suppress(OSError):
            connection.getpeername()  # a socket that listens has none
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                return cls(connection)
        connection.close()
        return None

    def is_idle(self) -> bool:
        """Return whether nothing is on its way, in neither direction, as far as this side knows."""
        import fcntl  # not on Windows
        import termios

        try:
            waiting = [
                fcntl.ioctl(self._connection.fileno(), each, bytes(4)) for each in (termios.FIONREAD, termios.TIOCOUTQ)
            ]
        except OSError:  # not every system can tell
            return True
        return not any(map(any, waiting))

    def end_reading(self) -> None:
        """End each read of this side. What it writes still goes out."""
        with contextlib.suppress(OSError):  # the peer has ended it
            self._connection.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """Hold it no longer."""
        self._connection.close()
