"""A process that is forked from another one, and does not outlive it."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Let this process be killed when its parent ends.

    Args:
        parent: the process that has forked this one.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # pragma: no cover  # it has ended just now
        os._exit(1)
