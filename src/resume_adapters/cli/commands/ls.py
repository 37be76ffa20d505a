"""``ls``: the checkpoints of a run directory."""

from __future__ import annotations

from typing import Annotated

import typer

from resume_adapters.cli import documents, policy, render, run_directory
from resume_adapters.cli.app import EXIT_CODES, Json, RunDir, app, console


@app.command(name="ls", epilog=EXIT_CODES)
def list_checkpoints(
    run_dir: RunDir,
    best: Annotated[
        str | None, typer.Option(metavar="METRIC[:min|max]", help="Mark the best by this metric, and show it.")
    ] = None,
    json: Json = False,
) -> None:
    """List the checkpoints of a run directory, oldest first.

    Only the sizes of the files are checked. To check their content, use verify.
    """
    run = run_directory.read(run_dir)
    wanted = policy.best(best) if best is not None else None
    document = documents.checkpoints(run, run.best(wanted))
    if json:
        documents.write(document)
    else:
        render.checkpoints(console(), document, wanted.metric if wanted else None)
    raise typer.Exit(1 if run.damaged else 0)
