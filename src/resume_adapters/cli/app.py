"""What all commands share: the app that they register with, their common options, and a guard."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from resume_adapters.cli.run_directory import RunDirectory
from resume_adapters.core.run_directory.status import RunState, is_alive, observed_state
from resume_adapters.errors import UnsupportedSetting

EXIT_CODES = (
    "Exit codes: 0 success; 1 a checkpoint is damaged, or none is valid; 2 wrong usage, or a refusal; "
    "3 no such run directory, or not a run directory."
)

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Inspect, verify and prune a run directory of resume-adapters, and steer its run.",
    epilog=EXIT_CODES,
)

RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The directory that the run saves its checkpoints in.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]


def console() -> Console:
    """Return the console that tables are printed on."""
    return Console(highlight=False)


def require_not_running(run: RunDirectory, force: bool) -> None:
    """Refuse to change the checkpoints of a running job.

    Args:
        run: the run directory.
        force: do not check.

    Raises:
        UnsupportedSetting: the run is running, or may be.
    """
    status, _ = run.status()
    if status is None or force or observed_state(status) is not RunState.RUNNING:
        return
    found = "is running" if is_alive(status) else "has the status running, which cannot be checked from here"
    raise UnsupportedSetting(
        f"the run in {run.path} {found} (process {status.pid} on {status.host}): stop it first with "
        f"`resume-adapters stop --wait {run.path}`, or pass --force if it is gone"
    )
