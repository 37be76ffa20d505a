"""``drill``: the user's own command, undisturbed and with real faults, compared step by step."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from resume_adapters.cli import documents
from resume_adapters.cli.app import Json, app, console
from resume_adapters.cli.drill import report
from resume_adapters.cli.drill.drill import Drill, Result, Watcher, run
from resume_adapters.cli.drill.faults import KINDS, Fault, parse
from resume_adapters.cli.drill.job import DrillFailed
from resume_adapters.cli.drill.verdict import DIFFERENT, UNDECIDED

_EXIT_CODES = (
    "Exit codes: 0 both runs did the same; 1 they differ; 2 wrong usage, or no fault can be placed; 4 the drill could "
    "not judge: a launch failed or hung by itself, or the run is too short."
)
_STYLES = {DIFFERENT: "bold red", UNDECIDED: "bold yellow"}


@app.command(epilog=_EXIT_CODES)
def drill(
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND...", help="What to run; {run_dir} in it is replaced.")
    ],
    target: Annotated[
        Path, typer.Option("--dir", metavar="DIR", help="Where the runs are saved; must be new or empty.")
    ] = Path("resume-adapters-drill"),
    steps: Annotated[int | None, typer.Option(help="Steps of each run; by default until it ends.", min=3)] = None,
    faults: Annotated[
        str | None, typer.Option(metavar="KINDS", help=f"Which faults, with commas between them: {', '.join(KINDS)}.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Decides where the faults happen.")] = 0,
    references: Annotated[
        int, typer.Option(min=1, help="Undisturbed runs; two where the hardware does not repeat its results.")
    ] = 1,
    save_every: Annotated[int | None, typer.Option(min=1, help="Steps from one save to the next.")] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds without a step after which it hangs.")] = 600.0,
    json: Json = False,
) -> None:
    """Run your own training command undisturbed, then again with real faults, and compare the two step by step.

    For example: resume-adapters drill --steps 40 -- python train.py --output-dir {run_dir}
    """
    what = Drill(
        tuple(command),
        target,
        steps,
        parse(faults) if faults is not None else None,
        seed,
        references,
        save_every,
        timeout,
    )
    conduct(what, json)


def conduct(what: Drill, json: bool) -> None:
    """Run a drill, print its result, and end the command with the exit code of its verdict.

    Args:
        what: the drill.
        json: print one JSON document.
    """
    try:
        result = run(what, Progress(Console(stderr=True, highlight=False)))
    except DrillFailed as error:
        typer.echo(f"resume-adapters: {error}", err=True)
        raise typer.Exit(report.EXIT_CODES[UNDECIDED]) from error
    picture = _draw(result)
    if json:
        documents.write(report.document(result, picture))
    else:
        out = console()
        for line in report.lines(result, picture):
            word = line.partition(":")[0]
            style = _STYLES.get(word, "bold green" if word == result.verdict.word else None)
            out.print(line, style=style, markup=False, soft_wrap=True)
    raise typer.Exit(report.EXIT_CODES[result.verdict.word])


def _draw(result: Result) -> Path | None:
    """Plot the curves, if the extra ``plots`` is installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return None
    from resume_adapters.cli.drill import plot

    picture = result.drill.directory.absolute() / "loss.png"
    plot.draw(picture, result)
    return picture


class Progress(Watcher):
    """Prints what happens, a line for each launch and fault."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def event(self, run: str, number: int, event: dict[str, Any]) -> None:
        if event["rank"] == 0 and event["event"] == "start":
            begins = f"resumes from step {event['step']}" if event["step"] else "starts"
            self._console.print(f"{run}: launch {number} {begins}", markup=False, soft_wrap=True)

    def strike(self, run: str, number: int, fault: Fault) -> None:
        self._console.print(f"{run}: {fault}", style="red", markup=False, soft_wrap=True)
