"""``ls``: the checkpoints of a run directory."""

from __future__ import annotations

from typing import Annotated, NoReturn

import typer

from resume_adapters.cli import documents, remote, render, run_directory
from resume_adapters.cli.app import EXIT_CODES, Json, Places, app, console, only_url
from resume_adapters.cli.documents import Document
from resume_adapters.cli.run_directory import RunDirectory
from resume_adapters.core.checkpoint import policy_text


@app.command(name="ls", epilog=EXIT_CODES)
def list_checkpoints(
    run_dir: Places,
    best: Annotated[
        str | None, typer.Option(metavar="METRIC[:min|max]", help="Mark the best by this metric, and show it.")
    ] = None,
    json: Json = False,
) -> None:
    """List the checkpoints of a run directory, or of its copies in an object store, oldest first.

    Of several run directories, or of a directory above them (ls runs), an overview: one line for each run. Only the
    sizes of the files are checked. To check their content, use verify.
    """
    wanted = policy_text.best(best) if best is not None else None
    if (url := only_url(run_dir)) is not None:
        _show(remote.listing(url, wanted), best, json)
    paths = [place.path for place in run_dir]
    runs = run_directory.read_all(paths)
    if len(runs) > 1 or runs[0].path not in map(run_directory.resolved, paths):
        _show_overview(runs, json)
    run = runs[0]
    _show(documents.checkpoints(run, run.best(wanted)), best, json)


def _show(document: Document, best: str | None, json: bool) -> NoReturn:
    """Print the checkpoints of one run, and end the command."""
    if json:
        documents.write(document)
    else:
        render.checkpoints(console(), document, policy_text.best(best).metric if best is not None else None)
    raise typer.Exit(1 if any(row["state"] == "damaged" for row in document["checkpoints"]) else 0)


def _show_overview(runs: list[RunDirectory], json: bool) -> None:
    """Print one line for each run, and end the command."""
    document = documents.overview(runs)
    if json:
        documents.write(document)
    else:
        console().print(render.overview_table(document))
    raise typer.Exit(1 if any(run.damaged for run in runs) else 0)
