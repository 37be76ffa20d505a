"""``stop``, ``rewind`` and ``prune``: end a run, take it back to an earlier step, and remove its old checkpoints."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from msgspec.structs import replace
from rich.console import RenderableType

from resume_adapters.cli import run_directory
from resume_adapters.cli.app import (
    EXIT_CODES,
    STEER,
    Document,
    Force,
    Json,
    RunDir,
    app,
    console,
    refuse_running,
    show,
)
from resume_adapters.cli.commands.run import with_options
from resume_adapters.cli.commands.status import describe, status_table
from resume_adapters.cli.render import escape, size, state, table
from resume_adapters.cli.run_directory import STORAGE
from resume_adapters.core.checkpoint.catalog import Catalog
from resume_adapters.core.checkpoint.layout import latest_form, point_latest
from resume_adapters.core.checkpoint.remove import set_aside
from resume_adapters.core.checkpoint.resolve import open_checkpoint
from resume_adapters.core.checkpoint.retention import parse_best
from resume_adapters.core.checkpoint.validity import NoForeign
from resume_adapters.core.run_directory.prune import plan_prune, prune
from resume_adapters.core.run_directory.status import RunState, RunStatus, observed_state
from resume_adapters.core.session.options import TextOptions
from resume_adapters.errors import NoValidCheckpoint, UnsupportedSetting

_ENDED_AS_ASKED = (RunState.STOPPED, RunState.FINISHED, RunState.HALTED)


@app.command("prune", rich_help_panel=STEER, epilog=EXIT_CODES)
@with_options("keep_last", "keep_best", "keep_every", "keep_within")
def prune_run(
    run_dir: RunDir,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be removed.")] = False,
    force: Force = False,
    json: Json = False,
    **given: Any,
) -> None:
    """Remove what a retention policy does not keep. A checkpoint stays if any of the options keeps it.

    The checkpoint that a restart would resume from and the run's best always stay. Checkpoints that are damaged,
    pending or made without this package are not touched.
    """
    run = run_directory.read(run_dir)
    control = run.control()
    fence = control.fencing.no_start_from_now()
    options = TextOptions(**given)
    keep = options.policy()
    for text in options.keep_best:
        run.require_metric(parse_best(text).metric)
    catalog = Catalog(STORAGE, run.path)
    plan = plan_prune(catalog, keep, control.journal.committed(), now=time.time())
    if not dry_run:
        refuse_running(run.status(), run.path, force)
        if not plan.keep:
            raise NoValidCheckpoint(f"{run.path} has no valid checkpoint; nothing was removed", path=run.path)
        STORAGE.make_directory(control.path)
        plan = prune(catalog, plan, control, fence)
    described: dict[str, list[Document]] = {"keep": [], "remove": [], "untouched": []}
    for row in run.rows:
        name, facts = row.path.name, {"step": row.step, "bytes": row.manifest.bytes if row.manifest else None}
        for what, reasons in (("keep", plan.keep), ("remove", plan.remove)):
            if name in reasons:
                described[what].append({"name": name, **facts, "reason": reasons[name]})
        if name not in plan.keep | plan.remove:
            # A committed checkpoint that is not in the plan turned out to be damaged when its files were read.
            found = "damaged" if row.state == "committed" else row.state
            described["untouched"].append({"name": name, "state": found})
    document = {"run_directory": run.place, "dry_run": dry_run, **described}
    show(document, json, _pruning)


def _pruning(document: Document) -> Iterator[RenderableType]:
    found = table("name", "step", "size", "", "why", right=("step", "size"))
    rows = [(row, what) for what in ("keep", "remove") for row in document[what]]
    for row, what in sorted(rows, key=lambda each: int(each[0]["step"])):
        found.add_row(escape(row["name"]), str(row["step"]), size(row["bytes"]), state(what), escape(row["reason"]))
    yield found
    for row in document["untouched"]:
        yield f"{escape(row['name'])} is {state(row['state'])}: left alone"
    freed = size(sum(row["bytes"] for row in document["remove"]))
    of_all = f"{len(document['remove'])} of {len(rows)} checkpoints ({freed})"
    yield f"Would remove {of_all}; nothing was changed." if document["dry_run"] else f"Removed {of_all}."


@app.command(
    rich_help_panel=STEER, epilog=f"{EXIT_CODES} With --wait, 1 also means that the run ended otherwise than stopped."
)
def stop(
    run_dir: RunDir,
    wait: Annotated[bool, typer.Option("--wait", help="Return when the run has ended.")] = False,
    undo: Annotated[
        bool, typer.Option("--undo", help="Let a halted run be launched again; any other stays as it is.")
    ] = False,
    json: Json = False,
) -> None:
    """Ask the run to save and leave. It does so at the end of a step, within a second or so.

    If the run is not running, nothing is done, and stop says so. The same launch resumes it.
    """
    run = run_directory.read(run_dir)
    status = run.status()
    runs = not undo and observed_state(status) is RunState.RUNNING
    if undo:
        if wait:
            raise UnsupportedSetting("stop --undo stops nothing: pass it alone")
        if status is not None and status.state is RunState.HALTED:
            reason = f"was halted: {status.reason}; a human let it go on"
            released = replace(status, state=RunState.STOPPED, reason=reason, updated=time.time())
            run.control().status.write(released)
    elif runs:
        run.control().stop_file.request("resume-adapters stop")
        while wait and observed_state(run.status()) is RunState.RUNNING:
            time.sleep(0.2)
    elif not json:
        console().print(f"Nothing runs in {escape(run.place)}, so nothing was stopped.", soft_wrap=True)
    document = {**describe(run_directory.read(run_dir)), "asked": runs}
    show(document, json, lambda found: [status_table(found)])
    raise typer.Exit(1 if wait and document["state"] not in _ENDED_AS_ASKED else 0)


@app.command(rich_help_panel=STEER, epilog=EXIT_CODES)
def rewind(
    run_dir: RunDir,
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="A committed checkpoint: its name or step.")],
    force: Force = False,
    json: Json = False,
) -> None:
    """Take a run back: the next launch resumes from CHECKPOINT.

    That checkpoint is verified first. The later ones are moved to .resume/set-aside, not deleted. A job that still
    runs in the directory unnoticed can no longer commit.
    """
    run = run_directory.read(run_dir)
    chosen, status = run.checkpoint(checkpoint), run.status()
    if chosen.manifest is None:
        known = ", ".join(row.path.name for row in run.rows if row.manifest)
        raise UnsupportedSetting(f"{chosen.path} is {chosen.state}; expected a committed checkpoint: {known or 'none'}")
    refuse_running(status, run.path, force)
    open_checkpoint(STORAGE, chosen.path, NoForeign())
    name, step, control = chosen.path.name, chosen.manifest.step, run.control()
    generation = control.fencing.take_over()
    fence = functools.partial(control.fencing.require_owned, generation)
    shelved = {
        row.path.name: set_aside(STORAGE, row.path, fence).name
        for row in run.rows
        if row.path != chosen.path and (row.step is None or row.step > step)
    }
    point_latest(STORAGE, run.path, name, latest_form(STORAGE, run.path))
    control.journal.append("rewind", step=step, generation=generation, set_aside=sorted(shelved.values()))
    if status is None or status.state is not RunState.HALTED:  # a halted run stays halted
        epoch, reason = chosen.manifest.epoch, f"rewound to step {step}"
        stopped = RunStatus(state=RunState.STOPPED, step=step, epoch=epoch, generation=generation, reason=reason)
        control.status.write(replace(stopped, updated=time.time()))
    document = {"run_directory": run.place, "step": step, "checkpoint": name, "set_aside": shelved}
    show(document, json, _rewinding)


def _rewinding(document: Document) -> Iterator[str]:
    for name, shelf in document["set_aside"].items():
        yield f"{escape(name)} was moved to .resume/set-aside/{escape(shelf)}"
    yield f"The next launch resumes from {escape(document['checkpoint'])}."
