"""``push``: checkpoints of a run directory to an object store."""

from __future__ import annotations

import uuid
from typing import Annotated

import typer

from resume_adapters.cli import documents, remote, render, run_directory
from resume_adapters.cli.app import EXIT_CODES, Json, RunDir, app, complete_checkpoint, console
from resume_adapters.cli.run_directory import STORAGE
from resume_adapters.core.checkpoint.resolve import open_checkpoint
from resume_adapters.core.checkpoint.validity import NoForeign
from resume_adapters.core.tiers.keys import place_of
from resume_adapters.core.tiers.tier import LocalFile, TierCheckpoint
from resume_adapters.errors import TierUnavailable, UnsupportedSetting


@app.command(epilog=EXIT_CODES)
def push(
    run_dir: RunDir,
    url: Annotated[str, typer.Argument(metavar="URL", help="Where to: s3://bucket/runs/a, gs://, az://, file://.")],
    checkpoint: Annotated[
        str | None,
        typer.Argument(
            metavar="[CHECKPOINT]", help="A name or a step; by default the newest.", autocompletion=complete_checkpoint
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Verify a checkpoint of a run directory and copy it to an object store, from where an empty machine resumes.

    A launch with that mirror does so by itself. A copy that is there is left as it is.
    """
    run = run_directory.read(run_dir)
    row = run.checkpoint(checkpoint) if checkpoint else run.anchor
    if row is None or row.manifest is None:
        raise UnsupportedSetting(f"{run.path} holds no committed checkpoint to copy")
    open_checkpoint(STORAGE, row.path, NoForeign())
    manifest = row.manifest
    place = place_of(row.path.name, manifest.generation, uuid.uuid4().hex[:12], manifest.written)
    found = TierCheckpoint(place, row.path.name, manifest)
    tier = remote.open_url(url)
    is_there = any(each.identity == found.identity for each in tier.checkpoints())
    if not is_there:
        tier.copy(place, LocalFile.of(STORAGE, row.path, manifest.files))
        if (missing := tier.missing(found)) is not None:
            raise TierUnavailable(f"{url}/{missing} after it was copied: give the same command again")
        tier.publish(found)
    document = {"url": url, "run_directory": str(run.path), "checkpoint": row.path.name, "bytes": manifest.bytes}
    if json:
        documents.write({**document, "was_there": is_there})
    else:
        render.copied(console(), document)
