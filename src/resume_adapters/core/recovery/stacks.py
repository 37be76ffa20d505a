"""Where the threads of this process are, as text."""

from __future__ import annotations

import sys
import threading
import traceback


def describe_threads() -> str:
    """Return the stack of each thread, the main thread's first, each with the innermost call last."""
    names = {each.ident: each.name for each in threading.enumerate()}
    first = threading.main_thread().ident
    found = sorted(sys._current_frames().items(), key=lambda each: each[0] != first)
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}" for ident, frame in found
    )
