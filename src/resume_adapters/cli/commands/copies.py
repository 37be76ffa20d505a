"""``pull`` and ``push``: checkpoints from an object store to a run directory, and from there to the store."""

from __future__ import annotations

import functools
import time
import uuid
from pathlib import Path
from typing import Annotated

import typer

from resume_adapters.cli import run_directory
from resume_adapters.cli.app import EXIT_CODES, MOVE, Force, Json, Named, RunDir, app, refuse_running, show
from resume_adapters.cli.render import size, tracked, working
from resume_adapters.cli.run_directory import STORAGE, chosen_copies, open_url
from resume_adapters.core.checkpoint.layout import Pointer, latest_form, latest_name
from resume_adapters.core.checkpoint.resolve import open_checkpoint
from resume_adapters.core.checkpoint.validity import NoForeign
from resume_adapters.core.ranks import SINGLE_PROCESS
from resume_adapters.core.run_directory.control import ControlDirectory
from resume_adapters.core.run_directory.upkeep import prepare
from resume_adapters.core.storage.groups import shared_by_all
from resume_adapters.core.tiers.remote import place_of
from resume_adapters.core.tiers.tier import Fetch, TierCheckpoint
from resume_adapters.errors import TierUnavailable, UnsupportedSetting


@app.command(rich_help_panel=MOVE, epilog=EXIT_CODES)
def pull(
    url: Annotated[str, typer.Argument(metavar="URL", help="Where a run copies its checkpoints to.")],
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run directory; it need not exist.")],
    checkpoint: Named = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Fetch a checkpoint from an object store, verify it, and commit it in a run directory.

    A launch with the same mirror does that by itself. What has the checkpoint's name in the run directory is set aside.
    """
    tier = open_url(url)
    found = chosen_copies(tier, [checkpoint] if checkpoint else [])[-1]
    directory = run_directory.resolved(run_dir)
    control = ControlDirectory(STORAGE, directory, time.time)
    prepare(STORAGE, directory)
    refuse_running(control.status.read(), directory, force)
    # Later than the start that owns the URL: else a launch that claims it late would take that for a later one.
    generation = control.fencing.take_over(tier.claims.owner()[0])
    fence = functools.partial(control.fencing.require_owned, generation)
    # As `latest` names a checkpoint already, or as DeepSpeed needs it.
    bare: Pointer = "file" if found.manifest.framework.startswith("deepspeed ") else "link"
    latest = bare if latest_name(STORAGE, directory) is None else latest_form(STORAGE, directory)
    group = shared_by_all(SINGLE_PROCESS)
    with working(f"Fetching {found.name} ({size(found.manifest.bytes)})"):
        Fetch(STORAGE, SINGLE_PROCESS, group, directory, fence, control.journal, latest).bring(tier, found)
    document = {"url": url, "run_directory": str(directory), "checkpoint": found.name, "bytes": found.manifest.bytes}
    show(document, json)


@app.command(rich_help_panel=MOVE, epilog=EXIT_CODES)
def push(
    run_dir: RunDir,
    url: Annotated[str, typer.Argument(metavar="URL", help="Where to: s3://bucket/runs/a, gs://, az://, file://.")],
    checkpoint: Named = None,
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
    name, manifest = row.path.name, row.manifest
    place = place_of(name, manifest.generation, uuid.uuid4().hex[:12], manifest.written)
    found = TierCheckpoint(place, name, manifest)
    tier = open_url(url)
    is_there = any(each.identity == found.identity for each in tier.checkpoints())
    if not is_there:
        tier.copy(place, row.path, tracked(name, manifest.files))
        if (missing := tier.missing(found)) is not None:
            raise TierUnavailable(f"{url}/{missing} after it was copied: give the same command again")
        tier.publish(found)
    document = {"url": url, "run_directory": run.place, "checkpoint": name, "bytes": manifest.bytes}
    show({**document, "was_there": is_there}, json)
