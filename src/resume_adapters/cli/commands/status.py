"""``status``: how a run is, once or until it is over."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.live import Live

from resume_adapters.cli import documents, render, run_directory
from resume_adapters.cli.app import EXIT_CODES, Json, RunDir, app, console
from resume_adapters.cli.documents import Document
from resume_adapters.core.run_directory.status import RunState


@app.command(epilog=EXIT_CODES)
def status(
    run_dir: RunDir,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again each second, until the run is over.")] = False,
    json: Json = False,
) -> None:
    """Show how the run is, and what the same launch would resume from now.

    A run was killed if its status is running and its process on this host is gone. With --watch and --json, one
    document a line.
    """
    run = run_directory.read(run_dir)
    document = documents.status(run)
    if watch:
        document = _watch(run_dir, document, json)
    elif json:
        documents.write(document)
    else:
        render.status(console(), document)
    raise typer.Exit(1 if document["damaged"] else 0)


def _watch(run_dir: Path, document: Document, json: bool) -> Document:
    """Show the status each second until it is no longer ``running``, and return the last."""
    out = console()
    with Live(console=out, auto_refresh=False) if out.is_terminal and not json else nullcontext() as live:
        while True:
            if json:
                documents.write_line(document)
            elif live is None:
                render.status(out, document)
            else:
                live.update(render.status_table(document), refresh=True)
            if document["state"] != RunState.RUNNING:
                return document
            time.sleep(1.0)
            document = documents.status(run_directory.read(run_dir))
