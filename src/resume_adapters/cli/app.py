"""What all commands share: the app that they register with, their common options, and a guard."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from resume_adapters._version import __version__
from resume_adapters.cli import run_directory
from resume_adapters.cli.remote import Place
from resume_adapters.cli.run_directory import RunDirectory
from resume_adapters.core.run_directory.status import RunState, RunStatus, is_alive, observed_state
from resume_adapters.errors import ResumeError, UnsupportedSetting

EXIT_CODES = (
    "Exit codes: 0 success; 1 a checkpoint is damaged, or none is valid; 2 wrong usage, or a refusal; "
    "3 no such run directory, or not a run directory."
)

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EXIT_CODES,
)

_RUN_DIR = "The directory that the run saves its checkpoints in, or the one above its checkpoints/."

RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help=_RUN_DIR)]
Places = Annotated[
    list[Place],
    typer.Argument(
        parser=Place,
        metavar="RUN_DIR...",
        help=f"{_RUN_DIR} Several, or one above them: an overview. Or the URL of its copies: s3://bucket/runs/a.",
    ),
]
OnePlace = Annotated[
    Place,
    typer.Argument(parser=Place, metavar="RUN_DIR", help=f"{_RUN_DIR} Or the URL of its copies: s3://bucket/runs/a."),
]
RunDirs = Annotated[
    list[Path], typer.Argument(metavar="RUN_DIR...", help=f"{_RUN_DIR} Several, or one above them: an overview.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]


_UNLIMITED = 10_000
"""Columns of a table that is not printed on a terminal: each of its rows is one line."""


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"resume-adapters {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version, and leave.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Inspect, verify and prune a run directory of resume-adapters, and steer its run."""


def complete_checkpoint(context: typer.Context, incomplete: str) -> list[str]:
    """Return the checkpoints of the run directory on the command line whose names begin so."""
    given = str(context.params.get("run_dir") or "")
    try:
        names = [row.path.name for row in run_directory.read(Path(given)).rows] if given else []
    except (ResumeError, OSError):
        return []
    return [name for name in names if name.startswith(incomplete)]


def only_url(places: list[Place]) -> str | None:
    """Return the URL that a command was given; ``None`` for run directories.

    Raises:
        UnsupportedSetting: it was given a URL among others.
    """
    urls = [place.text for place in places if place.is_url]
    if urls and len(places) > 1:
        raise UnsupportedSetting(f"{urls[0]} is a URL; expected it alone, or run directories")
    return urls[0] if urls else None


def console() -> Console:
    """Return the console that tables are printed on."""
    is_narrow = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, width=None if is_narrow else _UNLIMITED)


def require_not_running(run: RunDirectory, force: bool) -> None:
    """Refuse to change the checkpoints of a running job.

    Args:
        run: the run directory.
        force: do not check.

    Raises:
        UnsupportedSetting: the run is running, or may be.
    """
    status, _ = run.status()
    refuse_running(status, run.path, force)


def refuse_running(status: RunStatus | None, path: Path, force: bool) -> None:
    """Refuse to change a run directory whose status says that its job is running.

    Args:
        status: its status.
        path: the run directory.
        force: do not check.

    Raises:
        UnsupportedSetting: the run is running, or may be.
    """
    if status is None or force or observed_state(status) is not RunState.RUNNING:
        return
    found = "is running" if is_alive(status) else "has the status running, which cannot be checked from here"
    raise UnsupportedSetting(
        f"the run in {path} {found} (process {status.pid} on {status.host}): stop it first with "
        f"`resume-adapters stop --wait {path}`, or pass --force if it is gone"
    )
