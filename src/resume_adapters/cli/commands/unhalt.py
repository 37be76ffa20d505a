"""``unhalt``: allow a halted run to be launched again."""

from __future__ import annotations

import sys

from msgspec.structs import replace

from resume_adapters.cli import documents, render, run_directory
from resume_adapters.cli.app import EXIT_CODES, Json, RunDir, app, console
from resume_adapters.core.run_directory.status import RunState


@app.command(epilog=EXIT_CODES)
def unhalt(run_dir: RunDir, json: Json = False) -> None:
    """Allow a halted run to be launched again: the next launch resumes it. Any other run stays as it is."""
    run = run_directory.read(run_dir)
    status, _ = run.status()
    if status is not None and status.state is RunState.HALTED:
        reason = f"was halted: {status.reason}; a human let it go on"
        run.control().status.write(replace(status, state=RunState.STOPPED, reason=reason))
    document = documents.status(run_directory.read(run_dir))
    if json:
        documents.write(document)
    else:
        render.status(console(), document)


@app.command("resume", epilog=EXIT_CODES, hidden=True)
def former_name(run_dir: RunDir, json: Json = False) -> None:
    """Do what ``unhalt`` does: its name up to version 0.1."""
    print("resume-adapters: `resume` is called `unhalt` now, and goes with the next version", file=sys.stderr)
    unhalt(run_dir, json)
