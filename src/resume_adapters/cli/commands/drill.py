"""``drill``: the user's own command, or an example, undisturbed and with real faults, compared step by step."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from resume_adapters.cli.app import RUN, Json, app, show
from resume_adapters.cli.drill import report
from resume_adapters.cli.drill.drill import Drill, run
from resume_adapters.cli.drill.faults import KINDS, parse
from resume_adapters.errors import MissingFramework, UnsupportedSetting

_EXIT_CODES = (
    "Exit codes: 0 both runs did the same; 1 they differ; 2 wrong usage, an extra is missing, or no fault can be "
    "placed; 4 the drill could not judge: a launch failed or hung by itself, or the run is too short."
)

DEMO_STEPS = 60
_DEMO = ("--cpu", "--output-dir", "{run_dir}", "--steps", str(DEMO_STEPS), "--save-steps", "5", "--eval-steps", "20")
# One thread: the number of threads changes the order of additions, and so the last bits.
_DEMO_ENVIRONMENT = (("OMP_NUM_THREADS", "1"), ("HF_HUB_OFFLINE", "1"), ("TQDM_DISABLE", "1"))
_NEEDED = {
    "hf": ("transformers", "accelerate"),
    "accelerate": ("accelerate", "transformers"),
    "lightning": ("lightning",),
    "deepspeed": ("deepspeed",),
}


@app.command(rich_help_panel=RUN, epilog=_EXIT_CODES)
def drill(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="COMMAND...", help="What to run; {run_dir} in it is replaced.")
    ] = None,
    target: Annotated[
        Path | None, typer.Option("--dir", metavar="DIR", help="Where the runs are saved; must be new or empty.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(metavar="N", help="Steps of each run; by default until it ends.", min=3)
    ] = None,
    faults: Annotated[
        str | None, typer.Option(metavar="KINDS", help=f"Which faults, with commas between them: {', '.join(KINDS)}.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Decides where the faults happen.")] = 0,
    references: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="Undisturbed runs; two where the hardware does not repeat its results."),
    ] = 1,
    save_every: Annotated[int | None, typer.Option(metavar="N", min=1, help="Steps from one save to the next.")] = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=1, help="Without a step for so long, it hangs.")
    ] = 600.0,
    demo: Annotated[
        bool, typer.Option("--demo", help="Kill the package's example three times: resume-adapters demo.")
    ] = False,
    framework: Annotated[
        Literal["hf", "accelerate", "lightning", "deepspeed"], typer.Option(help="With --demo, whose example.")
    ] = "hf",
    json: Json = False,
) -> None:
    """Run your own training command undisturbed, then again with real faults, and compare the two step by step.

    For example: resume-adapters drill --steps 40 -- python train.py --output-dir {run_dir}

    The demo takes about a minute on two cores. It needs the extra of its framework.
    """
    if demo == bool(command):
        raise UnsupportedSetting("expected what to run, after --, or --demo")
    environment = _DEMO_ENVIRONMENT if demo else ()
    if demo:
        missing = [name for name in _NEEDED[framework] if importlib.util.find_spec(name) is None]
        if missing:
            raise MissingFramework(f"the demo needs {' and '.join(missing)}: pip install {' '.join(missing)}")
        command = [sys.executable, str(example(framework)), *_DEMO, "--seed", str(seed)]
        faults = faults or "step,save,step"
    target = target or Path(f"resume-adapters-{'demo' if demo else 'drill'}")
    kinds = parse(",".join(KINDS) if faults is None else faults)
    what = Drill(tuple(command or ()), target, steps, kinds, seed, references, save_every, timeout, environment)
    errors = Console(stderr=True, highlight=False)
    result = run(what, lambda text, style: errors.print(text, style=style, markup=False, soft_wrap=True))
    document = report.document(result)
    show(document, json, report.lines)
    raise typer.Exit(report.EXIT_CODES[document["verdict"]])


def example(framework: str) -> Path:
    """Return the framework's example: inside an installed package, or beside it in a source checkout."""
    name = f"examples/{framework}_train.py"
    package = Path(__file__).parents[2]
    shipped = package / name
    return shipped if shipped.is_file() else package.parents[1] / name
