"""The states of a run, and what may become of them."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from resume_adapters.core.run_directory.status import (
    TRANSITIONS,
    RunState,
    RunStatus,
    may_start,
    observed_state,
)
from resume_adapters.errors import RunHalted

from miniature import Miniature


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
