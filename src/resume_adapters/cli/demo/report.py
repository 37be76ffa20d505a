"""The result of the demo, as text and as a JSON document."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from resume_adapters.cli.demo.kills import Point
from resume_adapters.cli.demo.result import Result
from resume_adapters.cli.demo.run import STEPS
from resume_adapters.cli.documents import Document


def document(result: Result) -> Document:
    """Describe the result of a demo; losses have all their digits."""
    killed = [launch for launch in result.interrupted.launches if launch.killed_at is not None]
    return {
        "identical": result.difference is None,
        "difference": result.difference,
        "directory": str(result.directory),
        "plot": str(result.plot),
        "seed": result.seed,
        "steps": STEPS,
        "steps_compared": len(result.interrupted.points),
        "kills": [
            {"step": launch.killed_at, "inside_save": launch.inside_save, "resumed_from": resumed}
            for launch, resumed in zip(killed, result.interrupted.resumed_from[1:], strict=True)
        ],
        "final_loss": {
            "reference": result.reference.points[-1].loss,
            "interrupted": result.interrupted.points[-1].loss,
        },
        "weights": {"reference": result.reference.digest, "interrupted": result.interrupted.digest},
        "seconds": round(result.seconds, 1),
    }


def report(console: Console, result: Result) -> None:
    """Print the losses around each kill, the digests of the weights, and whether the runs are identical."""
    console.print()
    console.print(_around_kills(result))
    twice = len(result.interrupted.points) - STEPS
    console.print(f"\nweights of the reference run    {result.reference.digest[:32]}...")
    console.print(f"weights of the interrupted run  {result.interrupted.digest[:32]}...")
    if result.difference is None:
        compared = f"{len(result.interrupted.points)} losses ({twice} of them computed again after a kill)"
        console.print(f"\n[bold green]identical[/]: {compared}, all learning rates and the final weights, bit for bit")
    else:
        console.print(f"\n[bold red]different[/]: {result.difference}")
    console.print(f"{result.seconds:.0f} s; the curves are in {result.plot}", soft_wrap=True)


def _around_kills(result: Result) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("step", "launch", "reference loss", "interrupted loss", ""):
        table.add_column(column, justify="right" if column in ("step", "launch") else "left")
    expected = {point.step: point for point in result.reference.points}

    def row(point: Point, launch: int) -> None:
        one, other = expected[point.step].loss, point.loss
        same = "[green]same[/]" if one.hex() == other.hex() else "[bold red]DIFFERENT[/]"
        table.add_row(str(point.step), str(launch), repr(one), repr(other), same)

    launches, starts = result.interrupted.launches, result.interrupted.resumed_from
    for number, launch in enumerate(launches, start=1):
        row(launch.points[0], number)
        if launch.killed_at is not None:
            row(launch.points[-1], number)
            inside = " inside a save" if launch.inside_save else ""
            table.add_row("", "", f"[red]SIGKILL{inside}[/]", f"[cyan]resumed from step {starts[number]}[/]", "")
    row(launches[-1].points[-1], len(launches))
    return table
