"""``stop``: ask a run to save and leave, or kill it; undone, let a halted run be launched again."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from typing import Annotated

import typer
from msgspec.structs import replace

from resume_adapters.cli import documents, render, run_directory
from resume_adapters.cli.app import EXIT_CODES, Json, RunDir, app, console
from resume_adapters.cli.documents import Document
from resume_adapters.cli.run_directory import RunDirectory
from resume_adapters.cli.text import visible
from resume_adapters.core.checkpoint.layout import CONTROL
from resume_adapters.core.run_directory.status import RunState, RunStatus, observed_state
from resume_adapters.core.stop.processes import command_line, has_open
from resume_adapters.errors import UnsupportedSetting

_ENDED_AS_ASKED = (RunState.STOPPED, RunState.FINISHED, RunState.HALTED)


@app.command(epilog=f"{EXIT_CODES} With --wait, 1 also means that the run ended otherwise than stopped.")
def stop(
    run_dir: RunDir,
    force: Annotated[
        bool, typer.Option("--force", help="Kill it at once with SIGKILL, after a question: nothing is saved.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With --force, do not ask.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Return when the run has ended.")] = False,
    undo: Annotated[
        bool, typer.Option("--undo", help="Let a halted run be launched again; any other stays as it is.")
    ] = False,
    json: Json = False,
) -> None:
    """Ask the run to save and leave. It does so at the end of a step, within a second or so.

    If the run is not running, nothing is done, and stop says so. The same launch resumes it.
    """
    run = run_directory.read(run_dir)
    if undo:
        if force or wait:
            raise UnsupportedSetting("stop --undo stops nothing: pass it alone")
        _let_go_on(run)
        _show({**documents.status(run_directory.read(run_dir)), "asked": False}, json)
        return
    status, _ = run.status()
    runs = _may_be_running(status)
    if runs:
        assert status is not None
        if force:
            _kill(run, status, ask=not yes)
        else:
            run.control().stop_file.request("resume-adapters stop")
        if wait or force:
            _wait_for_end(run)
    if not runs and not json:
        console().print(f"Nothing runs in {visible(str(run.path))}: nothing was asked.", markup=False, soft_wrap=True)
    document = {**documents.status(run_directory.read(run_dir)), "asked": runs}
    _show(document, json)
    raise typer.Exit(1 if wait and not force and document["state"] not in _ENDED_AS_ASKED else 0)


def _show(document: Document, json: bool) -> None:
    if json:
        documents.write(document)
    else:
        render.status(console(), document)


def _let_go_on(run: RunDirectory) -> None:
    """Let the next launch resume a run that is halted."""
    status, _ = run.status()
    if status is not None and status.state is RunState.HALTED:
        reason = f"was halted: {status.reason}; a human let it go on"
        run.control().status.write(replace(status, state=RunState.STOPPED, reason=reason))


def _may_be_running(status: RunStatus | None) -> bool:
    return observed_state(status) is RunState.RUNNING


def _kill(run: RunDirectory, status: RunStatus, *, ask: bool) -> None:
    """Kill the process of a run. What the status names may be any process: anybody can write a status.

    Raises:
        UnsupportedSetting: it is not known to be the run's, or nobody can be asked.
    """
    if status.host != socket.gethostname():
        job = f"; or end its job, {status.job}, through the scheduler" if status.job else ""
        raise UnsupportedSetting(
            f"process {status.pid} is on {status.host}, and only a process on this host can be killed: do it there{job}"
        )
    if not has_open(status.pid, os.path.realpath(run.control().fencing.file)):
        raise UnsupportedSetting(
            f"{CONTROL}/status.json names process {status.pid} ({command_line(status.pid) or 'hidden'}), which does "
            f"not hold {run.path}, as a run does: it was not killed. If it is the run, kill it yourself"
        )
    if ask:
        if not sys.stdin.isatty():
            raise UnsupportedSetting("--force asks before it kills, and there is no terminal: pass --yes as well")
        typer.confirm(f"Kill process {status.pid} ({visible(command_line(status.pid))})?", abort=True)
    os.kill(status.pid, signal.SIGKILL)


def _wait_for_end(run: RunDirectory) -> None:
    while _may_be_running(run.status()[0]):
        time.sleep(0.2)
