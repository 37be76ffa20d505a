"""What the system knows of a process: whether it is alive, since when, and who started it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

_BTIME = "btime "

_LAUNCHER = re.compile(
    r"(.*/)?(torchrun|accelerate|deepspeed)"
    r"|torch\.distributed\.(run|launch)|accelerate\.commands\.launch|deepspeed\.launcher\.(launch|runner)"
)

_WORDS = 5
"""How many words of a command line may name the launcher: the interpreter, its options, the module."""


def start_time(pid: int) -> float | None:
    """Return when a process began, in seconds since 1970; ``None`` where there is no ``/proc`` to say so."""
    try:
        boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith(_BTIME))
        ticks = float(_stat(pid)[19])
    except (OSError, StopIteration):
        return None
    return float(boot.removeprefix(_BTIME)) + ticks / os.sysconf("SC_CLK_TCK")


def find_launchers() -> Callable[[], bool]:
    """Find the launchers among this process's ancestors (torchrun, accelerate, deepspeed).

    Returns:
        Asks whether all of them are still there. A launcher that is killed leaves its workers running; a shell or a
        ``nohup`` that goes is no such loss. Where there is no ``/proc``, none is found.
    """
    found = [pid for pid in _ancestors(os.getpid()) if _is_launcher(pid)]
    identities = {pid: start_time(pid) for pid in found}
    return lambda: all(start_time(pid) == beginning and not is_dead(pid) for pid, beginning in identities.items())


def _ancestors(pid: int) -> list[int]:
    found = []
    while pid > 1:
        try:
            pid = int(_stat(pid)[1])
        except OSError:
            break
        found.append(pid)
    return found


def _is_launcher(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return False
    return any(_LAUNCHER.fullmatch(word) for word in words[:_WORDS])


def is_dead(pid: int) -> bool:
    """Return whether a process is dead but not yet reaped. Answers only where there is a ``/proc``."""
    try:
        return _stat(pid)[0] in "ZX"
    except OSError:
        return False


def _stat(pid: int) -> list[str]:
    """Return the fields of a process's status from its state on."""
    # The second field is the program's name in parentheses, which may itself hold spaces and parentheses.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
