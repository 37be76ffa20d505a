"""What of this process another one would lack that is forked from it: threads of libraries, and devices in use."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_TASKS = Path("/proc/self/task")
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/davinci", "/dev/accel")


def other_threads() -> list[str] | None:
    """Return the names of the threads of this process but the main one; ``None`` where the system does not say.

    Threads that Python knows nothing of are among them.
    """
    found = []
    try:
        for task in os.listdir(_TASKS):
            if int(task) != os.getpid():
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                    found.append((_TASKS / task / "comm").read_text().strip())
    except FileNotFoundError:  # another system than Linux
        return None
    return found


def devices_in_use() -> list[str]:
    """Return the device files of accelerators that this process has open: a driver is initialised in it."""
    found = []
    for descriptor in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # it has been closed meanwhile
            found.append(os.readlink(f"/dev/fd/{descriptor}"))
    return [each for each in found if each.startswith(_DEVICES)]
