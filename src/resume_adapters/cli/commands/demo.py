"""``demo``: a drill of the package's example: a training run that is killed three times, and one that never was."""

from __future__ import annotations

import importlib.util
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from resume_adapters.cli.app import Json, app
from resume_adapters.cli.commands.drill import conduct
from resume_adapters.cli.drill.drill import Drill
from resume_adapters.errors import MissingFramework

STEPS = 60

_OPTIONS = ("--cpu", "--output-dir", "{run_dir}", "--steps", str(STEPS), "--save-steps", "5", "--eval-steps", "20")
_FAULTS = ("step", "save", "step")
# One thread: the number of threads changes the order of additions, and so the last bits.
_ENVIRONMENT = (("OMP_NUM_THREADS", "1"), ("HF_HUB_OFFLINE", "1"), ("TQDM_DISABLE", "1"))
_NEEDED = {
    "hf": ("transformers", "accelerate"),
    "accelerate": ("accelerate", "transformers"),
    "lightning": ("lightning",),
    "deepspeed": ("deepspeed",),
}


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

    Takes about a minute on two cores, and needs the extras cli and the framework's; with plots, it draws the losses.
    """
    _require_installed(framework.value)
    command = (sys.executable, str(example(framework.value)), *_OPTIONS, "--seed", str(seed))
    conduct(Drill(command, target, faults=_FAULTS, seed=seed, environment=_ENVIRONMENT), json)


def _require_installed(framework: str) -> None:
    missing = [name for name in _NEEDED[framework] if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingFramework(f"the demo needs {' and '.join(missing)}: pip install {' '.join(missing)}")


def example(framework: str) -> Path:
    """Return the framework's example: inside an installed package, or beside it in a source checkout."""
    name = f"examples/{framework}_train.py"
    package = Path(__file__).parents[2]
    shipped = package / name
    return shipped if shipped.is_file() else package.parents[1] / name
