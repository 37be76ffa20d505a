"""The command's frame: what all commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from resume_adapters.cli.run_directory import RunDirectory
from resume_adapters.core.run_directory.status import is_alive
from resume_adapters.errors import UnsupportedSetting

EXIT_CODES = (
    "Exit codes: 0 fine; 1 a checkpoint is damaged, or none is valid; 2 wrong usage, or a refusal; "
    "3 no such run directory, or not a run directory."
)

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Look at a run directory of resume-adapters, prove it, steer its run, and tidy it.",
    epilog=EXIT_CODES,
)

RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The directory that the run saves its checkpoints in.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]


def console() -> Console:
    """Return where tables for people go."""
    return Console(highlight=False)


def require_at_rest(run: RunDirectory, force: bool) -> None:
    """Refuse to change what a running job is working on.

    Raises:
        UnsupportedSetting: the run is running, or may be.
    """
    status, _ = run.status()
    if status is None or status.state != "running" or force or (alive := is_alive(status)) is False:
        return
    found = "is running" if alive else "says that it is running, which cannot be checked from here"
    raise UnsupportedSetting(
        f"the run in {run.path} {found} (process {status.pid} on {status.host}): stop it first with "
        f"`resume-adapters stop --wait {run.path}`, or pass --force if it is gone"
    )
