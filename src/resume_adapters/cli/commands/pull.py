"""``pull``: a checkpoint from an object store to a run directory."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Annotated

import typer

from resume_adapters.cli import documents, remote, render, run_directory
from resume_adapters.cli.app import EXIT_CODES, Json, app, console, refuse_running
from resume_adapters.cli.run_directory import STORAGE
from resume_adapters.core.checkpoint.latest import Pointer, latest_form, latest_name
from resume_adapters.core.checkpoint.manifest import Manifest
from resume_adapters.core.ranks import SINGLE_PROCESS
from resume_adapters.core.run_directory.control import ControlDirectory
from resume_adapters.core.run_directory.upkeep import prepare
from resume_adapters.core.storage.groups import shared_by_all
from resume_adapters.core.tiers.fetch import Fetch


@app.command(epilog=EXIT_CODES)
def pull(
    url: Annotated[str, typer.Argument(metavar="URL", help="Where a run copies its checkpoints to.")],
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run directory; it need not exist.")],
    checkpoint: Annotated[
        str | None, typer.Argument(metavar="[CHECKPOINT]", help="A name or a step; by default the newest.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Pull even if the run seems to be running.")] = False,
    json: Json = False,
) -> None:
    """Fetch a checkpoint from an object store, verify it, and commit it in a run directory.

    A launch with the same mirror does that by itself. What has the checkpoint's name in the run directory is set aside.
    """
    tier = remote.open_url(url)
    found = remote.chosen(tier, [checkpoint] if checkpoint else [])[-1]
    directory = run_directory.resolved(run_dir)
    control = ControlDirectory(STORAGE, directory, time.time)
    refuse_running(control.status.read(), directory, force)
    prepare(STORAGE, directory)
    # Later than the start that owns the URL: else a launch that claims it late would take that for a later one.
    generation = control.fencing.take_over(tier.owner()[0])
    fence = functools.partial(control.fencing.require_owned, generation)
    group = shared_by_all(SINGLE_PROCESS)
    latest = _latest_form(directory, found.manifest)
    fetch = Fetch(STORAGE, SINGLE_PROCESS, group, directory, fence, control.journal, latest)
    fetch.bring(tier, found)
    document = {"url": url, "run_directory": str(directory), "checkpoint": found.name, "bytes": found.manifest.bytes}
    if json:
        documents.write(document)
    else:
        render.copied(console(), document)


def _latest_form(directory: Path, manifest: Manifest) -> Pointer:
    """Return how ``latest`` is to name a checkpoint: as it does already, or as DeepSpeed needs it."""
    if latest_name(STORAGE, directory) is not None:
        return latest_form(STORAGE, directory)
    return "file" if manifest.framework.startswith("deepspeed ") else "link"
