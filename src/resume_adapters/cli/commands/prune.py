"""``prune``: remove what a retention policy does not keep."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from resume_adapters.cli import documents, render, run_directory
from resume_adapters.cli.app import EXIT_CODES, Json, RunDir, app, console, require_not_running
from resume_adapters.cli.run_directory import STORAGE
from resume_adapters.core.checkpoint import policy_text
from resume_adapters.core.run_directory.prune import plan_prune, prune
from resume_adapters.errors import NoValidCheckpoint


@app.command("prune", epilog=EXIT_CODES)
def prune_run(
    run_dir: RunDir,
    keep_last: Annotated[int | None, typer.Option(metavar="N", help="Keep the newest N.")] = None,
    keep_best: Annotated[
        list[str] | None,
        typer.Option(metavar="METRIC[:min|max[:N]]", help="Keep the N best by a metric; may be given several times."),
    ] = None,
    keep_every: Annotated[int | None, typer.Option(metavar="STEPS", help="Keep multiples of STEPS steps.")] = None,
    keep_within: Annotated[
        str | None, typer.Option(metavar="PERIOD", help="Keep what was written within 90m, 12h, 7d ...")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be removed.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Prune even if the run seems to be running.")] = False,
    json: Json = False,
) -> None:
    """Remove what a retention policy does not keep. A checkpoint stays if any of the options keeps it.

    The checkpoint that a restart would resume from and the run's best always stay. Checkpoints that are damaged,
    pending or made without this package are not touched.
    """
    run = run_directory.read(run_dir)
    fence = run.control().fencing.no_start_from_now()
    bests = [policy_text.best(text) for text in keep_best or []]
    keep = policy_text.join(keep_last, bests, keep_every, keep_within)
    for each in bests:
        run.require_metric(each.metric)
    plan = plan_prune(STORAGE, run.path, keep, run.control().journal.committed(), now=time.time())
    if not dry_run:
        require_not_running(run, force)
        if not plan.keep:
            raise NoValidCheckpoint(f"{run.path} has no valid checkpoint; nothing was removed", path=run.path)
        STORAGE.make_directory(run.control().path)
        plan = prune(STORAGE, run.path, plan, run.control().journal, run.control().leftovers, fence)
    document = documents.pruning(run, plan, dry_run)
    if json:
        documents.write(document)
    else:
        render.pruning(console(), document)
