"""Whether the process that a status names is still there."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from resume_adapters.core.journal import Status

_BTIME = "btime "


def is_alive(status: Status) -> bool | None:
    """Return whether the process that wrote a status still lives; ``None`` where it ran on another host."""
    if status.host != socket.gethostname():
        return None
    if not 0 < status.pid < 1 << 31:
        return False
    try:
        os.kill(status.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is there, and somebody else's
        pass
    return not _is_another(status.pid, status.updated)


def _is_another(pid: int, updated: float) -> bool:
    """Return whether a process is dead but not yet reaped, or began after the status: the number was given again.

    Answers only where there is a ``/proc``; elsewhere the number alone has to do.
    """
    try:
        # The second field is the program's name in parentheses, which may itself hold spaces and parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith(_BTIME))
    except (OSError, StopIteration):
        return False
    began = float(boot.removeprefix(_BTIME)) + float(fields[19]) / os.sysconf("SC_CLK_TCK")
    return fields[0] in "ZX" or began > updated + 2.0  # the boot time is known to the second
