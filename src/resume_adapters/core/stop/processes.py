"""Facts about processes: whether one is alive, since when, and which launchers started this one. Read by psutil.

psutil is imported when it is first needed, so that importing this package stays cheap.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

_LAUNCHER = re.compile(
    r"(.*/)?(torchrun|accelerate|deepspeed|resume-adapters)|resume_adapters\.cli"
    r"|torch\.distributed\.(run|launch)|accelerate\.commands\.launch|deepspeed\.launcher\.(launch|runner)"
)

_WORDS = 5
"""How many words of a command line may name the launcher: the interpreter, its options, the module."""


def start_time(pid: int) -> float | None:
    """Return when a process began, in seconds since 1970; ``None`` if there is no such process or it is hidden."""
    import psutil

    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return None


def is_dead(pid: int) -> bool:
    """Return whether a process is dead but not yet reaped; ``False`` if it is hidden."""
    import psutil

    try:
        return _is_dead(psutil.Process(pid))
    except psutil.Error:
        return False


def find_launchers() -> Callable[[], bool]:
    """Find the launchers among this process's ancestors (torchrun, accelerate, deepspeed, a drill).

    Returns:
        A function that returns whether all of them are alive. A killed launcher leaves its workers running. Other
        ancestors do not count: a shell or ``nohup`` may end before the run does.
    """
    import psutil

    try:
        launchers = [ancestor for ancestor in psutil.Process().parents() if _is_launcher(ancestor)]
    except psutil.Error:  # ancestors are hidden, as in some containers
        launchers = []
    return lambda: all(_is_alive(launcher) for launcher in launchers)


def _is_launcher(process: psutil.Process) -> bool:
    import psutil

    try:
        words = process.cmdline()
    except psutil.Error:
        return False
    return any(_LAUNCHER.fullmatch(word) for word in words[:_WORDS])


def _is_alive(process: psutil.Process) -> bool:
    import psutil

    try:
        # The second question recognises another process that got the same pid.
        return not _is_dead(process) and bool(process.is_running())
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:  # hidden: nobody can say that it is gone
        return True


def _is_dead(process: psutil.Process) -> bool:
    import psutil

    return process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
