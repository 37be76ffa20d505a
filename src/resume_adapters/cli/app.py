"""What all commands share: the app that they register with, their common arguments, how they print, and a guard."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec
import typer
from rich.console import Console, RenderableType
from rich.table import Table
from typer.core import TyperGroup

from resume_adapters._version import __version__
from resume_adapters.cli.render import facts, give_way
from resume_adapters.core.run_directory.status import RunState, RunStatus, is_alive, observed_state
from resume_adapters.errors import UnsupportedSetting

Document = dict[str, Any]
"""What a command found. Its keys are public: keys are added, never renamed."""

EXIT_CODES = (
    "Exit codes: 0 success; 1 a checkpoint is damaged, or none is valid; 2 wrong usage, or a refusal; "
    "3 no such run directory, or not a run directory."
)

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=f"{EXIT_CODES[:-1]}; 4 the drill could not judge.",
)

RUN, LOOK, STEER, MOVE = "Run and prove", "Look", "Steer", "Move"
"""The groups of commands in --help."""


_RUN_DIR = "The directory that the run saves its checkpoints in, or the one above its checkpoints/."
_URL = "the URL of its copies: s3://bucket/runs/a."

RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help=_RUN_DIR)]
Place = Annotated[str, typer.Argument(metavar="RUN_DIR", help=f"{_RUN_DIR} Or {_URL}")]
RunDirs = Annotated[list[str], typer.Argument(metavar="RUN_DIR...", help=f"{_RUN_DIR} Several: an overview.")]
Places = Annotated[
    list[str],
    typer.Argument(metavar="RUN_DIR...", help=f"{_RUN_DIR} Several: an overview. Or {_URL}"),
]


Named = Annotated[str | None, typer.Argument(metavar="CHECKPOINT", help="A name or step; by default the newest.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]
Force = Annotated[bool, typer.Option("--force", help="Do so even if the run seems to be running.")]

_LINE_BREAK = re.compile(r"(?<!\n)\n(?!\n)")

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


def with_plain_help() -> TyperGroup:
    """Return the command: its help breaks no line where the docstring does, and calls no flag a <bool>.

    The help of each command is in click's form: rich's boxes cut long options, and break words, on 80 columns.
    """
    group = cast(TyperGroup, typer.main.get_command(app))
    outer = typer.Context(cast(Any, group), **group.context_settings)
    inner = [typer.Context(cast(Any, command), parent=outer) for command in group.commands.values()]
    for context in (outer, *inner):
        cast(Any, context.command).rich_markup_mode = "rich" if context is outer else None
        context.command.help = _LINE_BREAK.sub(" ", context.command.help or "")
        for parameter in context.command.get_params(context):
            if getattr(parameter, "is_flag", False):
                cast(Any, parameter).metavar = ""
    return group


def console() -> Console:
    """Return the console that tables are printed on."""
    is_narrow = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, width=None if is_narrow else _UNLIMITED)


Words = Callable[[Document], Iterable[RenderableType]]


def show(document: Document, json: bool, in_words: Words = facts) -> None:
    """Print a document, as JSON or in words: tables, and lines with rich's markup."""
    if json:
        print(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())
        return
    out = console()
    for each in in_words(document):
        if isinstance(each, Table) and each.show_header:
            give_way(each, out)
        out.print(each, soft_wrap=isinstance(each, str))


def refuse_running(status: RunStatus | None, path: Path, force: bool) -> None:
    """Refuse to change a run directory whose status says that its job is running; ``force``: do not check.

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
