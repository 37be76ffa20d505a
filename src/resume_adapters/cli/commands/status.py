"""``status``: how a run is, once or until it is over."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.live import Live

from resume_adapters.cli import documents, remote, render, run_directory
from resume_adapters.cli.app import EXIT_CODES, Json, Places, app, console, only_url
from resume_adapters.cli.documents import Document
from resume_adapters.core.run_directory.status import RunState
from resume_adapters.errors import UnsupportedSetting


@app.command(epilog=EXIT_CODES)
def status(
    run_dir: Places,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show it again each second, until the run is finished or halted.")
    ] = False,
    json: Json = False,
) -> None:
    """Show how the run is, and what the same launch would resume from now.

    Of several run directories (status runs/*), or of a directory above them, an overview: one line for each run. A run
    was killed if its status is running and its process on this host is gone. --watch waits for the next launch of a run
    that was stopped or killed, or that failed. With --watch and --json, one document a line. Of a URL: what is there,
    and which start has claimed it.
    """
    if (url := only_url(run_dir)) is not None:
        if watch:
            raise UnsupportedSetting(f"--watch follows a run directory, and {url} has none: leave it out")
        _show_remote(url, json)
    paths = [place.path for place in run_dir]
    document = _read(paths)
    if watch:
        document = _watch(lambda: _read(paths), document, json)
    elif json:
        documents.write(document)
    else:
        console().print(render.status_of_one_or_all(document))
    runs = document.get("runs", [document])
    raise typer.Exit(1 if any(each["damaged"] for each in runs) else 0)


def _show_remote(url: str, json: bool) -> NoReturn:
    """Print what is at a URL, and end the command."""
    document = remote.status(url)
    if json:
        documents.write(document)
    else:
        console().print(render.remote_status_table(document))
    raise typer.Exit(1 if document["damaged"] else 0)


def _read(run_dir: list[Path]) -> Document:
    runs = run_directory.read_all(run_dir)
    is_one = len(runs) == 1 and runs[0].path in map(run_directory.resolved, run_dir)
    return documents.status(runs[0]) if is_one else documents.overview(runs)


_OVER = (RunState.FINISHED, RunState.HALTED)
"""The states in which nobody waits for another launch."""


def _watch(read: Callable[[], Document], document: Document, json: bool) -> Document:
    """Show the status each second until each run is finished or halted, and return the last."""
    out = console()
    with Live(console=out, auto_refresh=False) if out.is_terminal and not json else nullcontext() as live:
        while True:
            if json:
                documents.write_line(document)
            elif live is None:
                out.print(render.status_of_one_or_all(document))
            else:
                live.update(render.status_of_one_or_all(document), refresh=True)
            if all(each["state"] in _OVER for each in document.get("runs", [document])):
                return document
            time.sleep(1.0)
            document = read()
