"""The commands that steer a run: stop it, let it go on, take it back to an earlier step, and read what happened."""

from __future__ import annotations

import os
import signal
import socket
import time
from typing import Annotated

import typer

from resume_adapters.cli import documents, render, run_directory
from resume_adapters.cli.app import EXIT_CODES, Json, RunDir, app, console, require_at_rest
from resume_adapters.cli.documents import Document
from resume_adapters.cli.run_directory import STORAGE, RunDirectory
from resume_adapters.core.checkpoint.checkpoint import CheckpointInfo
from resume_adapters.core.checkpoint.layout import LATEST
from resume_adapters.core.checkpoint.resolve import open_checkpoint
from resume_adapters.core.run_directory.status import RunStatus, is_alive
from resume_adapters.core.run_directory.upkeep import set_aside
from resume_adapters.core.storage.base import point_to
from resume_adapters.errors import UnsupportedSetting

_ENDED_AS_ASKED = ("stopped", "finished", "halted")


@app.command(epilog=f"{EXIT_CODES} With --wait, 1 also means that the run ended otherwise than stopped.")
def stop(
    run_dir: RunDir,
    force: Annotated[bool, typer.Option("--force", help="Kill it at once with SIGKILL: nothing is saved.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Return when the run has ended.")] = False,
    json: Json = False,
) -> None:
    """Ask the run to save and leave. It does so at the end of a step, within a second or so.

    Where it does not run, nothing is done. The same launch resumes it.
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
    return status is not None and status.state == "running" and is_alive(status) is not False


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


@app.command(epilog=EXIT_CODES)
def resume(run_dir: RunDir, json: Json = False) -> None:
    """Let a halted run go on: the next launch resumes it. A run that is not halted is left as it is."""
    run = run_directory.read(run_dir)
    status, _ = run.status()
    if status is not None and status.state == "halted":
        status.state, status.reason = "stopped", f"was halted: {status.reason}; a human let it go on"
        run.control().status.write(status)
    document = documents.status(run_directory.read(run_dir))
    if json:
        documents.write(document)
    else:
        render.status(console(), document)


@app.command(epilog=EXIT_CODES)
def rewind(
    run_dir: RunDir,
    step: Annotated[int, typer.Argument(metavar="STEP", help="The step of a committed checkpoint.")],
    force: Annotated[bool, typer.Option("--force", help="Rewind though the run seems to be running.")] = False,
    json: Json = False,
) -> None:
    """Take a run back: the next launch resumes from the checkpoint of STEP.

    That checkpoint is read whole first. The later ones are moved to .resume/set-aside, not deleted. What still runs on
    the directory unnoticed can commit nothing more.
    """
    run = run_directory.read(run_dir)
    chosen = _committed_at(run, step)
    require_at_rest(run, force)
    open_checkpoint(STORAGE, chosen.path, run_directory.foreign)
    status, _ = run.status()
    control = run.control()
    generation = control.fencing.take_over()
    moved = {
        row.path.name: set_aside(STORAGE, row.path).name
        for row in run.rows
        if row.path != chosen.path and (row.step is None or row.step > step)
    }
    latest = run.path / LATEST
    point_to(STORAGE, latest, chosen.path.name, "file" if latest.is_file() and not latest.is_symlink() else "link")
    control.journal.append("rewind", step=step, generation=generation, set_aside=sorted(moved.values()))
    if status is None or status.state != "halted":
        epoch = chosen.manifest.epoch if chosen.manifest else 0.0
        reason = f"rewound to step {step}"
        control.status.write(RunStatus(state="stopped", step=step, epoch=epoch, generation=generation, reason=reason))
    document = {"run_directory": str(run.path), "step": step, "checkpoint": chosen.path.name, "set_aside": moved}
    if json:
        documents.write(document)
    else:
        _tell_rewound(document)


def _committed_at(run: RunDirectory, step: int) -> CheckpointInfo:
    found = [row for row in run.rows if row.state == "committed" and row.step == step]
    if not found:
        known = ", ".join(str(row.step) for row in run.rows if row.state == "committed")
        raise UnsupportedSetting(f"{run.path} has no committed checkpoint of step {step}; it has {known or 'none'}")
    return found[0]


def _tell_rewound(document: Document) -> None:
    out = console()
    for name, shelf in document["set_aside"].items():
        out.print(f"{name} was moved to .resume/set-aside/{shelf}", markup=False)
    out.print(f"The next launch resumes from {document['checkpoint']}.", markup=False)


@app.command(epilog=EXIT_CODES)
def journal(
    run_dir: RunDir,
    last: Annotated[int | None, typer.Option("--last", metavar="N", min=1, help="Only the last N entries.")] = None,
    json: Json = False,
) -> None:
    """List what happened to the run, oldest first: starts, commits, prunes, stops."""
    run = run_directory.read(run_dir)
    entries = run.control().journal.history()
    document = {"run_directory": str(run.path), "entries": entries[-last:] if last else entries}
    if json:
        documents.write(document)
    else:
        render.journal(console(), document)
