"""``demo``: a training run that is killed three times, compared with one that never was."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from resume_adapters.cli import documents
from resume_adapters.cli.app import Json, app, console
from resume_adapters.cli.demo import report
from resume_adapters.cli.demo.run import run


class Framework(str, Enum):
    """The frameworks whose example ``demo`` can kill."""

    hf = "hf"
    accelerate = "accelerate"
    lightning = "lightning"
    deepspeed = "deepspeed"


@app.command(epilog="Exit codes: 0 the runs are identical; 1 they differ; 2 wrong usage, or an extra is missing.")
def demo(
    target: Annotated[
        Path, typer.Option("--dir", metavar="DIR", help="Where the runs are saved; must be new or empty.")
    ] = Path("resume-adapters-demo"),
    seed: Annotated[int, typer.Option(help="Decides the kills, the weights and the order of the data.")] = 0,
    framework: Annotated[Framework, typer.Option(help="Whose example to train.")] = Framework.hf,
    json: Json = False,
) -> None:
    """Train a small model without a kill, then again with three SIGKILLs, and compare the two step by step.

    Takes about a minute on two cores, and needs the extras cli, plots and the framework's.
    """
    result = run(target, seed, framework.value)
    if json:
        documents.write(report.document(result))
    else:
        report.report(console(), result)
    raise typer.Exit(0 if result.difference is None else 1)
