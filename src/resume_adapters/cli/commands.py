"""The commands and their options. Each reads, describes what it found, and prints it."""

from __future__ import annotations

import time
from contextlib import nullcontext
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from resume_adapters.cli import documents, policy, render, run_directory
from resume_adapters.cli.app import EXIT_CODES, Json, RunDir, app, console, require_at_rest
from resume_adapters.cli.run_directory import STORAGE
from resume_adapters.cli.verify import Verdict, choose, manifest_of, verify
from resume_adapters.core.checkpoint.checkpoint import CheckpointInfo
from resume_adapters.core.run_directory.prune import plan_prune, prune
from resume_adapters.errors import NoValidCheckpoint


class Framework(str, Enum):
    """The frameworks whose example ``demo`` can kill."""

    hf = "hf"
    accelerate = "accelerate"
    lightning = "lightning"
    deepspeed = "deepspeed"


@app.command(name="ls", epilog=EXIT_CODES)
def list_checkpoints(
    run_dir: RunDir,
    best: Annotated[
        str | None, typer.Option(metavar="METRIC[:min|max]", help="Mark the best by this metric, and show it.")
    ] = None,
    json: Json = False,
) -> None:
    """List the checkpoints of a run directory, oldest first.

    What is listed is not read whole: a file's content is checked by verify.
    """
    run = run_directory.read(run_dir)
    wanted = policy.best(best) if best is not None else None
    document = documents.listing(run, run.best(wanted))
    if json:
        documents.write(document)
    else:
        render.listing(console(), document, wanted.metric if wanted else None)
    raise typer.Exit(1 if run.damaged else 0)


@app.command(epilog=EXIT_CODES)
def status(
    run_dir: RunDir,
    watch: Annotated[bool, typer.Option("--watch", help="Show it anew each second, until the run is over.")] = False,
    json: Json = False,
) -> None:
    """Say how the run is, and what the same launch would resume from now.

    A run whose status says running and whose process is gone from this host was killed. With --watch and --json, one
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


def _watch(run_dir: Path, document: documents.Document, json: bool) -> documents.Document:
    """Show the status each second until it is not ``running`` any more, and return the last."""
    from rich.live import Live

    out = console()
    with Live(console=out, auto_refresh=False) if out.is_terminal and not json else nullcontext() as live:
        while True:
            if json:
                documents.write_line(document)
            elif live is None:
                render.status(out, document)
            else:
                live.update(render.status_table(document), refresh=True)
            if document["state"] != "running":
                return document
            time.sleep(1.0)
            document = documents.status(run_directory.read(run_dir))


@app.command(name="verify", epilog=EXIT_CODES)
def verify_checkpoints(
    run_dir: RunDir,
    checkpoints: Annotated[
        list[str] | None, typer.Argument(metavar="[CHECKPOINT]...", help="Names; by default all that are committed.")
    ] = None,
    json: Json = False,
) -> None:
    """Read every file of the committed checkpoints and compare it with the manifest's digest."""
    run = run_directory.read(run_dir)
    found = _verify_all(choose(run, checkpoints or []))
    document = documents.verdicts(run, found)
    if json:
        documents.write(document)
    else:
        render.verdicts(console(), document)
    all_valid = bool(found) and all(each.verdict == "valid" for each in found)
    raise typer.Exit(0 if all_valid else 1)


def _verify_all(rows: list[CheckpointInfo]) -> list[Verdict]:
    """Verify with a progress bar on standard error, where that is a terminal."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    if not console.is_terminal:  # before rich 14.3 even a bar that is disabled ends in an empty line
        return [verify(row, lambda file, count: None) for row in rows]
    total = sum(manifest.bytes for row in rows if (manifest := manifest_of(row)) is not None)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("reading", total=total)

        def advance(file: str, count: int) -> None:
            progress.update(task, advance=count, description=file)

        return [verify(row, advance) for row in rows]


@app.command("prune", epilog=EXIT_CODES)
def prune_run(
    run_dir: RunDir,
    keep_last: Annotated[int | None, typer.Option(metavar="N", help="Keep the newest N.")] = None,
    keep_best: Annotated[
        list[str] | None,
        typer.Option(metavar="METRIC[:min|max[:N]]", help="Keep the N best by a metric; may be given again."),
    ] = None,
    keep_every: Annotated[int | None, typer.Option(metavar="STEPS", help="Keep multiples of STEPS steps.")] = None,
    keep_within: Annotated[
        str | None, typer.Option(metavar="PERIOD", help="Keep what was written within 90m, 12h, 7d ...")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be removed.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Prune though the run seems to be running.")] = False,
    json: Json = False,
) -> None:
    """Remove what a retention policy does not keep. What any of the options keeps is kept.

    Whatever the policy, the checkpoint that a restart would resume from and the run's best are kept, and what is
    damaged, pending or made without this package is left alone.
    """
    run = run_directory.read(run_dir)
    bests = [policy.best(text) for text in keep_best or []]
    keep = policy.join(keep_last, bests, keep_every, keep_within)
    for each in bests:
        run.require_metric(each.metric)
    plan = plan_prune(STORAGE, run.path, keep, now=time.time())
    if not dry_run:
        require_at_rest(run, force)
        if not plan.keep:
            raise NoValidCheckpoint(f"{run.path} holds no valid checkpoint; nothing was removed", path=run.path)
        STORAGE.make_directory(run.control().path)
        prune(STORAGE, run.path, plan, run.control().journal)
    document = documents.pruning(run, plan, dry_run)
    if json:
        documents.write(document)
    else:
        render.pruning(console(), document)


@app.command(epilog="Exit codes: 0 the runs are identical; 1 they differ; 2 wrong usage, or an extra is missing.")
def demo(
    target: Annotated[
        Path, typer.Option("--dir", metavar="DIR", help="Where the runs go; must be new or empty.")
    ] = Path("resume-adapters-demo"),
    seed: Annotated[int, typer.Option(help="Chooses the kills, the weights and the data's order.")] = 0,
    framework: Annotated[Framework, typer.Option(help="Whose example to train.")] = Framework.hf,
    json: Json = False,
) -> None:
    """Train a small model undisturbed, then again with three SIGKILLs, and compare the two step by step.

    Takes about a minute on two cores, and needs the extras cli, plots and the framework's.
    """
    from resume_adapters.cli.demo import report, run

    result = run.run(target, seed, framework.value)
    if json:
        documents.write(report.document(result))
    else:
        report.report(console(), result)
    raise typer.Exit(0 if result.difference is None else 1)
