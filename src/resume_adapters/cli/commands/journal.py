"""``journal``: what happened to a run."""

from __future__ import annotations

from typing import Annotated

import typer

from resume_adapters.cli import documents, render, run_directory
from resume_adapters.cli.app import EXIT_CODES, Json, RunDir, app, console


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
