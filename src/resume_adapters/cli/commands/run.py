"""``run``: a command whose Trainers resume, though its script says nothing of it."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from resume_adapters.cli.app import RUN, app
from resume_adapters.core.session.options import OPTIONS, RUN_DIRECTORY, TextOptions, run_directory_override
from resume_adapters.errors import MissingFramework, UnsupportedSetting
from resume_adapters.unedited import reaching

_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_FOUND = "import resume_adapters_entry, resume_adapters.unedited"
_INTERPRETER = re.compile(r"python(\d+(\.\d+)*)?")


_OPTIONS = {
    "resume": ("HOW", 'auto, scratch, "scratch!" (sets checkpoints aside), or a path.'),
    "take": (None, "Begin a new run with the weights of --resume PATH, until it has a checkpoint of its own."),
    "keep_last": ("N", "Keep the newest N checkpoints."),
    "keep_best": ("METRIC[:min|max[:N]]", "Keep the N best by a metric; may be given several times."),
    "keep_every": ("STEPS", "Keep multiples of STEPS steps."),
    "keep_within": ("PERIOD", "Keep what was written within 90m, 12h, 7d ..."),
    "save_every": ("HOW_OFTEN", "Steps, a period such as 30m, or auto."),
    "mtbf": ("PERIOD", "Mean time between failures, for --save-every auto."),
    "verify": (None, "Compare the restored state with the saved one."),
    "audit_every": ("STEPS", "Compare the ranks of a training with DDP every STEPS steps and before each save."),
    "on_batch_change": (None, "With a different global batch size."),
    "on_save_error": (None, "When a save fails."),
    "stage": (None, "memory: training goes on before the write; auto: where that is worth it."),
    "mirror": ("URL", "Copy checkpoints there: s3://bucket/runs/{run}; {run} is the run directory's name."),
    "mirror_every": ("N", "Copy the first save and every Nth after it."),
    "mirror_keep_last": ("N", "Keep the newest N copies."),
    "exit_code": ("CODE", "Exit code of a run that was asked to stop and has saved."),
    "walltime": ("TIME", "How long the process may run, such as 11:50:00."),
    "reserve": ("TIME", "How long before the walltime ends the run saves and leaves."),
    "requeue": (None, "Ask Slurm to requeue the job then."),
}
"""For each option of the callbacks, which has a flag of its name, what it is given and what it does."""

_OTHERWISE_TYPED: dict[str, Any] = {"save_every": str | None, "requeue": bool}
"""The types of flags that are not those of the options."""


def with_options(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the flags of some of the callbacks' options, in the place of its keyword arguments."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = signature(function, eval_str=True).parameters.values()
        parameters = [each for each in own if each.kind != each.VAR_KEYWORD]
        for field in msgspec.structs.fields(TextOptions):
            if field.name in names:
                metavar, words = _OPTIONS[field.name]
                flags = ["--requeue"] if field.name == "requeue" else []
                default = [] if field.default is msgspec.NODEFAULT else field.default
                option = typer.Option(default, *flags, metavar=metavar, help=words)
                hint = _OTHERWISE_TYPED.get(field.name, field.type)
                parameters.append(Parameter(field.name, Parameter.KEYWORD_ONLY, default=option, annotation=hint))
        function.__annotations__ = {each.name: each.annotation for each in parameters}
        setattr(function, "__signature__", Signature(parameters))  # noqa: B010  # where the command's flags are read
        return function

    return decorate


_RunDirectory = Annotated[
    str | None, typer.Option("--run-dir", metavar="DIR", help="The run directory; by default the script's own.")
]


@app.command(
    "run",
    context_settings={"allow_interspersed_args": False},
    rich_help_panel=RUN,
    epilog="The exit code is that of the command; 2 also means wrong usage, or that the command cannot be reached.",
)
@with_options(*_OPTIONS)
def run_command(
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND...", help="What to run: a script, or a whole command line.")
    ],
    run_dir: _RunDirectory = None,
    **given: Any,
) -> None:
    """Run a training command: every Trainer of transformers and Lightning in it resumes, without a change to a script.

    For example: resume-adapters run --keep-last 3 -- torchrun --nproc-per-node 2 train.py --lr 1e-4

    A script alone (train.py, or -m package.train) is run by this Python, so that a launcher can start this command:
    torchrun --no-python resume-adapters run train.py
    """
    environment = _environment(run_dir, given)
    words = reached(command, environment)
    os.execvpe(words[0], words, environment)


@app.command("env", rich_help_panel=RUN)
@with_options(*_OPTIONS)
def env_command(run_dir: _RunDirectory = None, **given: Any) -> None:
    """Print what run sets, as lines of a shell: for a job that only takes an environment.

    For example: eval "$(resume-adapters env --keep-last 3)"
    """
    for name, value in _environment(run_dir, given).items():
        if os.environ.get(name) != value:
            typer.echo(f"export {name}={shlex.quote(value)}")


def _environment(run_dir: str | None, given: dict[str, Any]) -> dict[str, str]:
    """Return the environment of a command that resumes with these options."""
    options = TextOptions(**{**given, "requeue": "slurm" if given["requeue"] else None})
    options.arguments()
    environment = base_environment()
    environment[OPTIONS] = msgspec.json.encode(options).decode()
    if run_dir is not None:
        environment[RUN_DIRECTORY] = run_dir
        run_directory_override(environment)
    return environment


def base_environment() -> dict[str, str]:
    """Return the environment of a command that resumes, without options."""
    # Else each process orders sets of text in its own way, and what follows from them.
    return reaching({"PYTHONHASHSEED": "0", **os.environ})


def reached(command: list[str], environment: dict[str, str]) -> list[str]:
    """Return a command as it is started: a script alone by this Python.

    Raises:
        UnsupportedSetting, MissingFramework: nothing would come into its processes.
    """
    words = [sys.executable, *command] if command[0].endswith(".py") or command[0] == "-m" else command
    _require_reach(words, environment)
    return words


def _require_reach(words: list[str], environment: dict[str, str]) -> None:
    """Refuse a command into whose processes nothing would come.

    Raises:
        UnsupportedSetting: the program is not there, or torch is told to load no extensions.
        MissingFramework: its Python does not have this package, or is told to ignore the environment.
    """
    program = words[0]
    found = shutil.which(program)
    if found is None:
        raise UnsupportedSetting(f"there is no program {program} to run; a script needs its name to end in .py")
    if os.environ.get(_AUTOLOAD, "1") != "1":
        raise UnsupportedSetting(
            f"{_AUTOLOAD}={os.environ[_AUTOLOAD]} keeps torch from loading extensions, and so this package from "
            "reaching the Trainers of a script: unset it"
        )
    python = _python_of(Path(found))
    if not python:
        return
    flags = itertools.takewhile(lambda word: word.startswith("-") and word not in ("-c", "-m"), words[1:])
    asked = [python, *(flags if python == program else ()), "-c", _FOUND]
    if subprocess.run(asked, env=environment, capture_output=True, check=False).returncode:
        raise MissingFramework(
            f"{python}, which runs {program}, does not have this version of resume-adapters, or is told to ignore "
            f"PYTHONPATH (-I, -E): install it there, with {python} -m pip install; if it is installed from a checkout, "
            "do that again"
        )


def _python_of(program: Path) -> str | None:
    """Return the Python that a program is, or that its first line names; ``None`` for any other program."""
    if _INTERPRETER.fullmatch(program.name):
        return str(program)
    with program.open("rb") as file:
        first = file.readline(512)
    words = first.removeprefix(b"#!").decode(errors="replace").split() if first.startswith(b"#!") else []
    named = words[1] if len(words) > 1 and Path(words[0]).name == "env" else "".join(words[:1])
    return shutil.which(named) if _INTERPRETER.fullmatch(Path(named).name) else None
