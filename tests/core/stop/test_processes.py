"""Who started a process, and whether they are still there."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from resume_adapters.core.run_directory.status import RunState, RunStatus, is_alive
from resume_adapters.core.stop.processes import (
    _is_alive,
    _is_launcher,
    find_launchers,
    is_dead,
    start_time,
)

WORKER = """
import sys, time
from pathlib import Path
from resume_adapters.core.stop.processes import find_launchers
present = find_launchers()
out = Path(sys.argv[1])
out.write_text(f"{present()}")
while present():
    time.sleep(0.02)
out.write_text("gone")
"""

LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1], sys.argv[2]])"


def test_a_process_knows_when_it_began() -> None:
    before = time.time()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    beginning, own = start_time(process.pid), start_time(os.getpid())
    process.communicate(b"\n")
    assert beginning is not None and own is not None
    assert before - 2 < beginning < time.time() + 2, "the boot time is known to the second"
    assert own < beginning + 2
    assert start_time(1 << 30) is None


LAUNCHERS = [("torchrun", True, 2), ("accelerate", True, 1), ("train.sh", False, 1)]
FURTHER = [("torchrun", True, 1), ("resume-adapters", True, 1), ("accelerate", True, 2), ("train.sh", False, 2)]


@pytest.mark.parametrize(
    ("name", "noticed", "depth"), [*LAUNCHERS, *(pytest.param(*each, marks=pytest.mark.thorough) for each in FURTHER)]
)
def test_a_worker_notices_that_its_launcher_is_gone(tmp_path: Path, name: str, noticed: bool, depth: int) -> None:
    """A launcher is killed, two generations up as well: DeepSpeed has a runner above the launcher of a node."""
    launcher = tmp_path / name
    launcher.write_text(LAUNCHER)
    between = [] if depth == 1 else [LAUNCHER]
    words = [WORKER, str(tmp_path / "out")] if depth == 1 else [between[0], WORKER, str(tmp_path / "out")]
    if depth == 2:
        launcher.write_text("import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])")
    started = subprocess.Popen([sys.executable, launcher, *words], start_new_session=True)
    out = tmp_path / "out"
    try:
        wait_for(out, "True")
        started.kill()
        started.wait()
        if noticed:
            wait_for(out, "gone")
            wait_for_end(started.pid)
        else:
            time.sleep(0.3)
            assert out.read_text() == "True", "a shell that goes is no launcher"
    finally:
        subprocess.run(["pkill", "-KILL", "-s", str(started.pid)], check=False)


def wait_for(file: Path, content: str) -> None:
    deadline = time.monotonic() + 120
    while not file.exists() or file.read_text() != content:
        assert time.monotonic() < deadline, f"expected {content!r}"
        time.sleep(0.01)


def wait_for_end(session: int) -> None:
    """Wait until no process of a session is left: the worker ends by itself, so that its coverage is measured."""
    deadline = time.monotonic() + 120
    while subprocess.run(["pgrep", "-s", str(session)], stdout=subprocess.DEVNULL, check=False).returncode == 0:
        assert time.monotonic() < deadline, "expected the worker to end"
        time.sleep(0.05)


def status(pid: int, host: str, updated: float) -> RunStatus:
    return RunStatus(state=RunState.RUNNING, pid=pid, host=host, updated=updated)


@pytest.mark.parametrize("state", [psutil.STATUS_SLEEPING, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD])
def test_a_process_that_only_waits_to_be_reaped_is_dead(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = status(pid=os.getpid(), host=socket.gethostname(), updated=time.time())
    monkeypatch.setattr(psutil.Process, "status", lambda process: state)
    assert is_alive(own) is (state == psutil.STATUS_SLEEPING)


def test_what_cannot_be_looked_at_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where processes are hidden, no launcher is found, and a process counts as alive that can be signalled."""
    own = status(pid=os.getpid(), host=socket.gethostname(), updated=time.time())
    assert is_alive(own) is True
    assert is_alive(status(pid=own.pid, host="elsewhere", updated=own.updated)) is None
    for pid in (0, 1 << 31, 1 << 30):
        assert is_alive(status(pid=pid, host=own.host, updated=own.updated)) is False
    assert is_alive(status(pid=own.pid, host=own.host, updated=1.0)) is False, "the number was given again"

    def refuse(*arguments: Any) -> Any:
        raise PermissionError

    def hide(*arguments: Any) -> Any:
        raise psutil.AccessDenied

    this = psutil.Process()
    for hidden in ("cmdline", "create_time", "status", "parents"):
        monkeypatch.setattr(psutil.Process, hidden, hide)
    assert is_alive(own) is True
    assert find_launchers()() and not _is_launcher(this)
    monkeypatch.setattr(os, "kill", refuse)
    assert is_alive(own) is True, "it is there, and somebody else's"


def test_a_launcher_that_the_system_hides_counts_as_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    def status(process: psutil.Process) -> str:
        raise psutil.AccessDenied(process.pid)

    monkeypatch.setattr(psutil.Process, "status", status)
    assert _is_alive(psutil.Process())


def test_of_a_process_that_is_gone_nothing_is_known() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    process = psutil.Process(ended.pid)
    ended.wait()
    assert not _is_alive(process)
    assert not is_dead(ended.pid)
    assert not is_dead(os.getpid())
