"""How tests wait: for a condition, with a limit that a loaded machine does not reach."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

LIMIT = 120.0
"""Seconds."""


def until(condition: Callable[[], object], what: Callable[[], object] = str) -> None:
    """Wait until a condition holds; ``what`` returns what to say where it never does."""
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, what()
        time.sleep(0.002)


def until_ended(thread: threading.Thread) -> None:
    """Wait until a thread has ended."""
    thread.join(LIMIT)
    assert not thread.is_alive(), f"{thread.name} goes on"
