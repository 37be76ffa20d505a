"""``stop``: ask a run to save and leave, or kill it."""

from __future__ import annotations

import os
import signal
import socket
import time
from typing import Annotated

import typer

from resume_adapters.cli import documents, render, run_directory
from resume_adapters.cli.app import EXIT_CODES, Json, RunDir, app, console
from resume_adapters.cli.run_directory import RunDirectory
from resume_adapters.core.run_directory.status import RunState, RunStatus, observed_state
from resume_adapters.errors import UnsupportedSetting

_ENDED_AS_ASKED = (RunState.STOPPED, RunState.FINISHED, RunState.HALTED)


@app.command(epilog=f"{EXIT_CODES} With --wait, 1 also means that the run ended otherwise than stopped.")
def stop(
    run_dir: RunDir,
    force: Annotated[bool, typer.Option("--force", help="Kill it at once with SIGKILL: nothing is saved.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Return when the run has ended.")] = False,
    json: Json = False,
) -> None:
    """Ask the run to save and leave. It does so at the end of a step, within a second or so.

    If the run is not running, nothing is done. The same launch resumes it.
    """
    run = run_directory.read(run_dir)
    status, _ = run.status()
    if _may_be_running(status):
        assert status is not None
        if force:
            _kill(status)
        else:
            run.control().stop_file.request("resume-adapters stop")
        if wait or force:
            _wait_for_end(run)
    document = documents.status(run_directory.read(run_dir))
    if json:
        documents.write(document)
    else:
        render.status(console(), document)
    raise typer.Exit(1 if wait and not force and document["state"] not in _ENDED_AS_ASKED else 0)


def _may_be_running(status: RunStatus | None) -> bool:
    return observed_state(status) is RunState.RUNNING


def _kill(status: RunStatus) -> None:
    if status.host != socket.gethostname():
        job = f"; or end its job, {status.job}, through the scheduler" if status.job else ""
        raise UnsupportedSetting(
            f"process {status.pid} is on {status.host}, and only a process on this host can be killed: do it there{job}"
        )
    os.kill(status.pid, signal.SIGKILL)


def _wait_for_end(run: RunDirectory) -> None:
    while _may_be_running(run.status()[0]):
        time.sleep(0.2)
