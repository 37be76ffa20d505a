"""``run``: a command whose Trainers resume, though its script says nothing of it."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from resume_adapters.cli.app import app
from resume_adapters.core.choices import OnBatchChange, OnSaveError, Stage
from resume_adapters.core.session.environment import OPTIONS, RUN_DIRECTORY, TextOptions, run_directory_override
from resume_adapters.errors import MissingFramework, UnsupportedSetting
from resume_adapters.unedited import VARIABLE

_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_GROUP, _NAME = "torch.backends", "resume-adapters"
_FOUND = f"import importlib.metadata as m; exit({_NAME!r} not in [e.name for e in m.entry_points(group={_GROUP!r})])"
_INTERPRETER = re.compile(r"python(\d+(\.\d+)*)?")


@app.command(
    "run",
    context_settings={"allow_interspersed_args": False},
    epilog="The exit code is that of the command; 2 also means wrong usage, or that the command cannot be reached.",
)
def run_command(
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND...", help="What to run: a script, or a whole command line.")
    ],
    run_dir: Annotated[
        str | None, typer.Option(metavar="DIR", help="The run directory; by default the script's own.")
    ] = None,
    resume: Annotated[
        str, typer.Option(metavar="HOW", help='auto, scratch, "scratch!" (sets checkpoints aside), or a path.')
    ] = "auto",
    keep_last: Annotated[int | None, typer.Option(metavar="N", help="Keep the newest N checkpoints.")] = None,
    keep_best: Annotated[
        list[str] | None, typer.Option(metavar="METRIC[:min|max[:N]]", help="Keep the N best by a metric.")
    ] = None,
    keep_every: Annotated[int | None, typer.Option(metavar="STEPS", help="Keep multiples of STEPS steps.")] = None,
    keep_within: Annotated[
        str | None, typer.Option(metavar="PERIOD", help="Keep what was written within 90m, 12h, 7d ...")
    ] = None,
    save_every: Annotated[
        str | None, typer.Option(metavar="HOW_OFTEN", help="Steps, a period such as 30m, or auto.")
    ] = None,
    mtbf: Annotated[
        str | None, typer.Option(metavar="PERIOD", help="Mean time between failures, for --save-every auto.")
    ] = None,
    verify: Annotated[bool, typer.Option(help="Compare the restored state with the saved one.")] = True,
    on_batch_change: Annotated[OnBatchChange, typer.Option(help="With a different global batch size.")] = "refuse",
    on_save_error: Annotated[OnSaveError, typer.Option(help="When a save fails.")] = "stop",
    stage: Annotated[
        Stage, typer.Option(help="memory or disk: training goes on before the write; auto: where that is worth it.")
    ] = "auto",
    mirror: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="Copy checkpoints there: s3://bucket/runs/{run}, gs://, az://; {run} is the run directory's name.",
        ),
    ] = None,
    mirror_every: Annotated[int, typer.Option(metavar="N", help="Copy the first save and every Nth after it.")] = 1,
    mirror_keep_last: Annotated[int | None, typer.Option(metavar="N", help="Keep the newest N copies.")] = None,
    exit_code: Annotated[int, typer.Option(help="Exit code of a run that was asked to stop and has saved.")] = 0,
    walltime: Annotated[
        str | None, typer.Option(metavar="TIME", help="How long the process may run, such as 11:50:00.")
    ] = None,
    reserve: Annotated[
        str, typer.Option(metavar="TIME", help="How long before the walltime ends the run saves and leaves.")
    ] = "auto",
    requeue: Annotated[bool, typer.Option("--requeue", help="Ask Slurm to requeue the job then.")] = False,
) -> None:
    """Run a training command: every Trainer of transformers and Lightning in it resumes, without a change to a script.

    For example: resume-adapters run --keep-last 3 -- torchrun --nproc-per-node 2 train.py --lr 1e-4

    A script alone (train.py, or -m package.train) is run by this Python, so that a launcher can start this command:
    torchrun --no-python resume-adapters run train.py
    """
    options = TextOptions(
        resume=resume,
        keep_last=keep_last,
        keep_best=keep_best or [],
        keep_every=keep_every,
        keep_within=keep_within,
        save_every=save_every,
        mtbf=mtbf,
        verify=verify,
        on_batch_change=on_batch_change,
        on_save_error=on_save_error,
        stage=stage,
        mirror=mirror or [],
        mirror_every=mirror_every,
        mirror_keep_last=mirror_keep_last,
        exit_code=exit_code,
        walltime=walltime,
        reserve=reserve,
        requeue="slurm" if requeue else None,
    )
    options.arguments()
    words = [sys.executable, *command] if command[0].endswith(".py") or command[0] == "-m" else command
    _require_reach(words[0])
    environment = {
        "PYTHONHASHSEED": "0",  # else each process orders sets of text in its own way, and what follows from them
        **os.environ,
        VARIABLE: "1",
        OPTIONS: msgspec.json.encode(options).decode(),
    }
    if run_dir is not None:
        environment[RUN_DIRECTORY] = run_dir
        run_directory_override(environment)
    os.execvpe(words[0], words, environment)


def _require_reach(program: str) -> None:
    """Refuse a command into whose processes nothing would come.

    Raises:
        UnsupportedSetting: the program is not there, or torch is told to load no extensions.
        MissingFramework: its Python does not have this package.
    """
    found = shutil.which(program)
    if found is None:
        raise UnsupportedSetting(f"there is no program {program} to run; a script needs its name to end in .py")
    if os.environ.get(_AUTOLOAD, "1") != "1":
        raise UnsupportedSetting(
            f"{_AUTOLOAD}={os.environ[_AUTOLOAD]} keeps torch from loading extensions, and so this package from "
            "reaching the Trainers of a script: unset it"
        )
    python = _python_of(Path(found))
    if python is None:
        return
    if Path(python).parent == Path(sys.executable).parent:
        is_there = any(each.name == _NAME for each in importlib.metadata.entry_points(group=_GROUP))
    else:
        is_there = subprocess.run([python, "-c", _FOUND], stderr=subprocess.DEVNULL, check=False).returncode == 0
    if not is_there:
        raise MissingFramework(
            f"{python}, which runs {program}, does not have this version of resume-adapters: install it there, with "
            f"{python} -m pip install; if it is installed from a checkout, do that again"
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
