"""``rewind``: take a run back to an earlier step."""

from __future__ import annotations

import functools
from typing import Annotated

import typer

from resume_adapters.cli import documents, render, run_directory
from resume_adapters.cli.app import EXIT_CODES, Json, RunDir, app, complete_checkpoint, console, require_not_running
from resume_adapters.cli.run_directory import STORAGE, RunDirectory
from resume_adapters.core.checkpoint.checkpoint import CheckpointInfo
from resume_adapters.core.checkpoint.latest import latest_form, point_latest
from resume_adapters.core.checkpoint.resolve import open_checkpoint
from resume_adapters.core.checkpoint.validity import NoForeign
from resume_adapters.core.run_directory.status import RunState, RunStatus
from resume_adapters.core.run_directory.upkeep import set_aside
from resume_adapters.errors import UnsupportedSetting


@app.command(epilog=EXIT_CODES)
def rewind(
    run_dir: RunDir,
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT", help="A committed checkpoint: its name or step.", autocompletion=complete_checkpoint
        ),
    ],
    force: Annotated[bool, typer.Option("--force", help="Rewind even if the run seems to be running.")] = False,
    json: Json = False,
) -> None:
    """Take a run back: the next launch resumes from CHECKPOINT.

    That checkpoint is verified first. The later ones are moved to .resume/set-aside, not deleted. A job that still
    runs in the directory unnoticed can no longer commit.
    """
    run = run_directory.read(run_dir)
    chosen = _committed(run, checkpoint)
    step = chosen.manifest.step if chosen.manifest else 0
    require_not_running(run, force)
    open_checkpoint(STORAGE, chosen.path, NoForeign())
    document = {
        "run_directory": str(run.path),
        "step": step,
        "checkpoint": chosen.path.name,
        "set_aside": _rewind(run, chosen, step),
    }
    if json:
        documents.write(document)
    else:
        render.rewinding(console(), document)


def _committed(run: RunDirectory, named: str) -> CheckpointInfo:
    found = run.checkpoint(named)
    if found.state != "committed":
        known = ", ".join(row.path.name for row in run.rows if row.state == "committed")
        raise UnsupportedSetting(f"{found.path} is {found.state}; expected a committed checkpoint: {known or 'none'}")
    return found


def _rewind(run: RunDirectory, chosen: CheckpointInfo, step: int) -> dict[str, str]:
    """Set the checkpoints after a step aside, and return their new names; a halted run stays halted."""
    status, _ = run.status()
    control = run.control()
    generation = control.fencing.take_over()
    fence = functools.partial(control.fencing.require_owned, generation)
    shelved = {
        row.path.name: set_aside(STORAGE, row.path, fence).name
        for row in run.rows
        if row.path != chosen.path and (row.step is None or row.step > step)
    }
    point_latest(STORAGE, run.path, chosen.path.name, latest_form(STORAGE, run.path))
    control.journal.append("rewind", step=step, generation=generation, set_aside=sorted(shelved.values()))
    if status is None or status.state is not RunState.HALTED:
        epoch = chosen.manifest.epoch if chosen.manifest else 0.0
        reason = f"rewound to step {step}"
        control.status.write(
            RunStatus(state=RunState.STOPPED, step=step, epoch=epoch, generation=generation, reason=reason)
        )
    return shelved
