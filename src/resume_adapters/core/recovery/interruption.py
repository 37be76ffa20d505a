"""How a thread is interrupted in what it does, also where it waits in a system call."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

from resume_adapters.core.recovery.attempt import LeftByPeer

_SIGNAL = "SIGURG"
"""What wakes the main thread. Where nobody handles it, it is ignored."""


class Interruption:
    """Raises :class:`LeftByPeer` in the thread that made it.

    In the main thread that ends a sleep, and the wait for a lock, a thread or a file; elsewhere it comes after them. A
    call of a library that does not return is not interrupted.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._is_main = threading.current_thread() is threading.main_thread()
        self._is_allowed = self._is_raising = False

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Let :meth:`interrupt` interrupt while the context lasts.

        Raises:
            LeftByPeer: it has.
        """
        number = getattr(signal, _SIGNAL)
        former = signal.signal(number, self._handle) if self._is_main else None
        self._is_allowed = True
        try:
            yield
        finally:
            self._forbid()
            if self._is_main:
                signal.signal(number, signal.SIG_DFL if former is None else former)

    def interrupt(self) -> None:
        """Interrupt the thread, if that is allowed; another thread calls it."""
        self._is_raising = True
        if self._is_allowed and self._is_main:
            signal.pthread_kill(self._thread, getattr(signal, _SIGNAL))
        elif self._is_allowed:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(LeftByPeer))
        self._is_raising = False

    def _forbid(self) -> None:
        while True:
            with contextlib.suppress(LeftByPeer):  # it was on its way
                self._is_allowed = False
                while self._is_raising:
                    time.sleep(0.001)
                if not self._is_main:
                    self._receive()
                return

    def _receive(self) -> None:
        """Take what may still be on its way.

        Taken back instead, it would leave the interpreter looking for it at every call from then on, and one that is
        traced, for a debugger or its coverage, would hang there.
        """
        with contextlib.suppress(LeftByPeer):
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(LeftByPeer))
            while True:  # pragma: no cover  # most interpreters raise it before the call above returns
                time.sleep(0)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_allowed:
            raise LeftByPeer
