"""The states of a run, and what may become of them."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from resume_adapters.core.run_directory.status import (
    TRANSITIONS,
    RunState,
    RunStatus,
    may_start,
    observed_state,
)
from resume_adapters.core.storage.local import LocalStorage
from resume_adapters.errors import RunDirectoryUnusable, RunHalted, Stopped

from miniature import Miniature, new_run


def test_every_state_has_a_way_out_and_is_reached() -> None:
    assert TRANSITIONS.keys() == set(RunState)
    reached = {after for states in TRANSITIONS.values() for after in states}
    assert reached | {RunState.UNKNOWN} == set(RunState)


@pytest.mark.parametrize("state", [state for state in RunState if state not in (RunState.KILLED, RunState.UNKNOWN)])
def test_a_launch_is_refused_where_the_table_says_so(tmp_path: Path, state: RunState) -> None:
    job = Miniature(tmp_path)
    job.commit(10)
    job.run.set_state(state, step=10, reason="as told")
    job.run.close()
    if may_start(state):
        assert Miniature(tmp_path).step == 10
    else:
        assert state is RunState.HALTED
        with pytest.raises(RunHalted, match="as told"):
            Miniature(tmp_path)


def test_a_running_run_whose_process_is_dead_was_killed() -> None:
    def status(state: RunState, pid: int, host: str = socket.gethostname()) -> RunStatus:
        return RunStatus(state=state, pid=pid, host=host, updated=time.time())

    assert observed_state(None) is RunState.UNKNOWN
    assert observed_state(status(RunState.RUNNING, os.getpid())) is RunState.RUNNING
    assert observed_state(status(RunState.RUNNING, 1 << 30)) is RunState.KILLED
    assert observed_state(status(RunState.RUNNING, 1 << 30, "elsewhere")) is RunState.RUNNING
    assert observed_state(status(RunState.STOPPED, 1 << 30)) is RunState.STOPPED


# ---- Between taking a directory over and beginning to train


class Slow(LocalStorage):
    """Does something while a start, which has taken the directory over, is choosing what it resumes from."""

    def __init__(self, meanwhile: Callable[[], object]) -> None:
        super().__init__()
        self.meanwhile = meanwhile

    def append(self, path: Path, content: bytes) -> None:
        if b'"start"' in content:
            self.meanwhile()
        super().append(path, content)


def leave(directory: Path, state: RunState) -> bytes:
    """Leave a run in a state; return its status."""
    job = Miniature(directory)
    job.commit(10)
    job.run.set_state(state, step=10, horizon=10)
    job.run.close()
    return (directory / ".resume" / "status.json").read_bytes()


def test_a_launch_that_is_choosing_is_running_and_hears_a_request(tmp_path: Path) -> None:
    leave(tmp_path, RunState.FAILED)
    stop = tmp_path / ".resume" / "stop"
    stop.write_text("an old one")
    seen: list[RunStatus | None] = []

    def meanwhile() -> None:
        assert not stop.exists(), "it was for an earlier start"
        seen.append(run.control.status.read())
        stop.write_text("resume-adapters stop")

    run = new_run(tmp_path, storage=Slow(meanwhile))
    run.open()
    assert seen[0] is not None and observed_state(seen[0]) is RunState.RUNNING
    assert (seen[0].pid, seen[0].generation, seen[0].step, seen[0].last_commit) == (os.getpid(), 2, 10, 10)
    assert run.previous is not None and run.previous.state is RunState.FAILED
    run.begin(10, 1.0)
    with pytest.raises(Stopped):
        run.end_skipping()
    status = run.control.status.read()
    assert status is not None and (status.state, status.reason) == (RunState.STOPPED, "resume-adapters stop")
    assert not stop.exists()


@pytest.mark.parametrize("state", [None, RunState.FINISHED, RunState.STOPPED, RunState.RUNNING])
@pytest.mark.parametrize("fails", [True, False])
def test_a_launch_that_does_not_begin_leaves_the_status_as_it_was(
    tmp_path: Path, state: RunState | None, *, fails: bool
) -> None:
    before = None if state is None else leave(tmp_path, state)

    def meanwhile() -> None:
        if fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    run = new_run(tmp_path, storage=Slow(meanwhile))
    with pytest.raises(RunDirectoryUnusable) if fails else contextlib.nullcontext():
        run.open()
    run.close()
    file = tmp_path / ".resume" / "status.json"
    assert (file.read_bytes() if file.exists() else None) == before


def test_a_launch_that_does_not_begin_leaves_the_status_of_a_later_one(tmp_path: Path) -> None:
    earlier = new_run(tmp_path)
    earlier.open()
    leave(tmp_path, RunState.FINISHED)
    earlier.close()
    status = earlier.control.status.read()
    assert status is not None and (status.state, status.generation) == (RunState.FINISHED, 2)
