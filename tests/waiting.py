"""How tests wait: for a condition, with a limit that a loaded machine does not reach."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

LIMIT = 120.0
"""Seconds."""


def until(condition: Callable[[], object], what: Callable[[], object] = str) -> None:
    """Wait until a condition holds; ``what`` returns what to say where it never does."""
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, what()
        time.sleep(0.002)


def is_gone(pid: int) -> bool:
    """Return whether a process has ended, be it reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def until_ended(thread: threading.Thread) -> None:
    """Wait until a thread has ended."""
    thread.join(LIMIT)
    assert not thread.is_alive(), f"{thread.name} goes on"
