"""Fills the files of staged saves: a process of its own, or this one if that has died."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time

from resume_adapters.core.log import logger
from resume_adapters.core.staging.arena import Arena
from resume_adapters.core.storage import fill
from resume_adapters.core.storage.fill import Piece

_PATIENCE = 5.0
"""Seconds that the process gets to end, or to take a request."""

_PAUSE = 0.01
"""Seconds between two looks at whether it has ended."""

_CHANNEL, _BLOCK = 3, 4
"""The descriptors of the socket and of the memory, in the process."""


class Writer:
    """Fills files from an arena.

    The process has neither torch nor this package, runs at low priority, and ends when this one does. Signals that a
    scheduler sends to all processes of a job do not end it.

    Args:
        arena: where the bytes are.

    Attributes:
        is_alive: the process is, as far as is known.
        pid: the process.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._channel, theirs = socket.socketpair()
        self._channel.settimeout(_PATIENCE)
        with theirs:
            self.pid = _spawn(theirs.fileno(), arena)
        self.is_alive = True

    def fill(self, descriptor: int, pieces: list[Piece]) -> tuple[int, str]:
        """Fill the holes of a file, and return its size and digest; see :func:`fill.fill`.

        Raises:
            OSError: it could not be written.
        """
        if self.is_alive:
            try:
                fill.send(self._channel, descriptor, pieces)
                return fill.receive(self._channel, self._require_alive)
            except (EOFError, ConnectionError, TimeoutError):
                self.is_alive = False
                logger.warning("The process that writes checkpoints has died; this one goes on with its work.")
        return fill.fill(descriptor, pieces, self._arena.memory)

    def _require_alive(self) -> None:
        if self._has_ended():
            raise EOFError("the process has ended")

    def _has_ended(self) -> bool:
        try:
            return os.waitpid(self.pid, os.WNOHANG)[0] == self.pid
        except ChildProcessError:  # somebody has asked before
            return True

    def close(self) -> None:
        """End the process."""
        self._channel.close()
        patience = time.monotonic() + _PATIENCE
        while not self._has_ended():
            if time.monotonic() > patience:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
            time.sleep(_PAUSE)


def _spawn(channel: int, arena: Arena) -> int:
    """Start the process, and return its number.

    Not by ``subprocess``: until the new program runs, that waits at a pipe. A worker of a loader that the training
    forks in that instant has the pipe too, and holds it open for as long as it lives.
    """
    spare = max(channel, arena.descriptor, _BLOCK) + 1  # what is given may lie where the other goes
    actions = [
        (os.POSIX_SPAWN_DUP2, channel, spare),
        (os.POSIX_SPAWN_DUP2, arena.descriptor, spare + 1),
        (os.POSIX_SPAWN_DUP2, spare, _CHANNEL),
        (os.POSIX_SPAWN_DUP2, spare + 1, _BLOCK),
        *((os.POSIX_SPAWN_OPEN, each, os.devnull, os.O_RDWR, 0) for each in range(_CHANNEL)),
    ]
    command = [sys.executable, fill.__file__, *map(str, (_CHANNEL, _BLOCK, arena.size, os.getpid()))]
    return os.posix_spawn(sys.executable, command, os.environ, file_actions=actions)
