"""``du``: what the checkpoints of a run cost on disk, part by part."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from resume_adapters.cli import documents, render, run_directory
from resume_adapters.cli.app import EXIT_CODES, Json, RunDir, app, complete_checkpoint, console
from resume_adapters.cli.documents import Usage
from resume_adapters.cli.run_directory import STORAGE, RunDirectory
from resume_adapters.core.checkpoint import layout
from resume_adapters.core.checkpoint.native_parts import part_of_file
from resume_adapters.core.storage.base import leaves_under


@app.command(epilog=EXIT_CODES)
def du(
    run_dir: RunDir,
    checkpoints: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CHECKPOINT]...", help="Names or steps; by default all.", autocompletion=complete_checkpoint
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Show how many bytes each checkpoint has on disk, and how many of them are weights, optimizer and so on.

    .resume holds the journal, and the checkpoints that were set aside.
    """
    run = run_directory.read(run_dir)
    rows = [run.checkpoint(name) for name in checkpoints or []] or run.rows
    found = [_usage(row.path) for row in rows]
    if not checkpoints:
        found.append(_control(run))
    document = documents.usage(run, found)
    if json:
        documents.write(document)
    else:
        render.usage(console(), document)


def _usage(checkpoint: Path) -> Usage:
    parts: Counter[str] = Counter()
    for name, file in layout.files(STORAGE, checkpoint):
        is_payload = name.as_posix() == checkpoint.name and not STORAGE.is_directory(checkpoint)
        parts["one file" if is_payload else part_of_file(name.as_posix())] += STORAGE.size(file)
    return Usage(checkpoint.name, parts.total(), dict(parts))


def _control(run: RunDirectory) -> Usage:
    control = run.control().path
    files = leaves_under(STORAGE, control) if STORAGE.is_directory(control) else ()
    return Usage(control.name, sum(STORAGE.size(file) for file, kind in files if kind == "file"), {})
