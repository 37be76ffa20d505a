"""Fills the files of staged saves: a process of its own, or this one if that has died."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

from resume_adapters.core.log import logger
from resume_adapters.core.staging.arena import Arena
from resume_adapters.core.storage import fill
from resume_adapters.core.storage.fill import Piece

_PATIENCE = 5.0
"""Seconds that the process gets to end."""


class Writer:
    """Fills files from an arena.

    The process has neither torch nor this package, runs at low priority, and ends when this one does. Signals that a
    scheduler sends to all processes of a job do not end it.

    Args:
        arena: where the bytes are.

    Attributes:
        is_alive: the process is, as far as is known.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._channel, theirs = socket.socketpair()
        command = [theirs.fileno(), arena.descriptor, arena.size, os.getpid()]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, fill.__file__, *map(str, command)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), arena.descriptor),
            )
        self.is_alive = True

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def fill(self, descriptor: int, pieces: list[Piece]) -> tuple[int, str]:
        """Fill the holes of a file, and return its size and digest; see :func:`fill.fill`.

        Raises:
            OSError: it could not be written.
        """
        if self.is_alive:
            try:
                fill.send(self._channel, descriptor, pieces)
                return fill.receive(self._channel)
            except (EOFError, ConnectionError):
                self.is_alive = False
                logger.warning("The process that writes checkpoints has died; this one goes on with its work.")
        return fill.fill(descriptor, pieces, self._arena.memory)

    def close(self) -> None:
        """End the process."""
        self._channel.close()
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
