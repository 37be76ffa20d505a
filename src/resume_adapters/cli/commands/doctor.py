"""``doctor``: whether a run would come back, before it has to; of a command, by its first save."""

from __future__ import annotations

import itertools
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from typer.core import TyperCommand

from resume_adapters.cli import checks, run_directory
from resume_adapters.cli.app import RUN, Document, Json, app, show
from resume_adapters.cli.checks import Finding, Measured
from resume_adapters.cli.commands.run import base_environment, reached
from resume_adapters.cli.drill.job import DrillFailed, Event, Job, placed, require_inside
from resume_adapters.cli.render import escape, working
from resume_adapters.cli.run_directory import STORAGE, RunDirectory
from resume_adapters.core.checkpoint.layout import CheckpointState, state_of
from resume_adapters.errors import RunDirectoryUnusable

_UNREACHED = "No Trainer was made in this process"
"""What a process says that trains without this package."""


class _WithCommand(TyperCommand):
    """Takes the words after ``--`` as they are."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.obj = args[at + 1 :]
        return super().parse_args(ctx, args[:at])

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND...]"]


@app.command(
    cls=_WithCommand,
    rich_help_panel=RUN,
    epilog="Exit codes: 0 all is green or yellow; 1 something is red; 2 wrong usage, or the command cannot be reached; "
    "3 RUN_DIR is no directory, or a checkpoint.",
)
def doctor(
    context: typer.Context,
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="Where the run saves, or will save; by default here.")
    ] = Path(),
    grace: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="What the scheduler leaves between SIGTERM and SIGKILL.")
    ] = 30.0,
    save_every: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="The command saves after N steps; by default as it says.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=1, help="Without a step for so long, the command hangs.")
    ] = 600.0,
    json: Json = False,
) -> None:
    """Check what a run needs to come back: the disk, the scheduler, what repeats itself, versions, and its state.

    A command is run until its first save, in a directory of its own on the disk of RUN_DIR, and ended:
    resume-adapters doctor runs/a -- python train.py. In RUN_DIR nothing is changed.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what was made is removed
    path, command = run_directory.resolved(run_dir), list(context.obj or ())
    run, environment, start, found = _read(path), dict(os.environ), None, list[Finding]()
    save = _measured(run) if run is not None else None
    if command:
        environment = base_environment()
        command = reached(command, environment)
    try:
        with checks.scratch(path) as scratch:
            found += checks.disk(STORAGE, scratch)
            if command:
                save, start, failures = _first_save(command, environment, scratch / "job", save_every, timeout)
                found += failures
    except OSError as error:
        found.append(checks.unwritable(error))
    found += checks.room(checks.nearest(path), save)
    if run is not None:
        times = [float(entry["time"]) for entry in run.control().journal.history()]
        found.append(checks.clocks_of_run(times, time.time()))
    found += checks.scheduler(environment, save, grace, time.time())
    found += checks.determinism(environment, start)
    with suppress(PackageNotFoundError):
        found += checks.versions(requires("resume-adapters") or ())
    if save is not None or not command:
        found += checks.captured(save)
    worst = next((level for level in ("red", "yellow") if any(each.level == level for each in found)), "green")
    document = {
        "run_directory": str(path),
        "verdict": worst,
        "checks": [{**msgspec.to_builtins(each), **({"next": ""} if each.level == "green" else {})} for each in found],
        "save": _described(save),
    }
    show(document, json, _in_words)
    raise typer.Exit(1 if worst == "red" else 0)


def _read(path: Path) -> RunDirectory | None:
    """Return the run directory; ``None`` where there is none yet.

    Raises:
        RunDirectoryUnusable: something else is there.
    """
    try:
        return run_directory.read(path)
    except RunDirectoryUnusable:
        if (path.exists() and not path.is_dir()) or state_of(STORAGE, path) is CheckpointState.COMMITTED:
            raise
        return None


def _measured(run: RunDirectory) -> Measured | None:
    """Return what the saves of a run took; ``None`` before the first."""
    newest, status, history = run.newest, run.status(), list(run.control().journal.history())
    if newest is None:
        return None
    steps = sorted({row.manifest.step for row in run.rows if row.manifest is not None})
    every = (steps[-1] - steps[0]) // max(1, len(steps) - 1) or newest.step
    left = status.horizon - newest.step if status is not None and status.horizon else 0
    return Measured(
        manifest=newest,
        seconds=max((entry.get("seconds") or 0.0 for entry in history if entry["event"] == "commit"), default=0.0),
        step_seconds=1 / status.rate if status is not None and status.rate else 0.0,
        kept=1 if any(entry["event"] == "prune" for entry in history) else None,  # the others are there
        to_come=left // every if every else 0,
    )


def _first_save(
    words: list[str], environment: dict[str, str], directory: Path, save_every: int | None, timeout: float
) -> tuple[Measured | None, Event | None, list[Finding]]:
    """Run a command until its first save is committed, and end it.

    Returns:
        What the save took, what the command has traced at its start, and why there is no save.
    """
    place, seen = directory / "run", dict[str, Event]()
    place.mkdir(parents=True)
    command, variables = placed(words, place, save_every)
    environment = {**environment, "RESUME_ADAPTERS_TRACE_EVERY": "1000000000", **variables}

    def follow(event: Event) -> None:
        if event["event"] == "start":
            require_inside(event, place)
        seen.setdefault(event["event"], event)

    with ExitStack() as stack:
        stack.enter_context(working("running the command until its first save"))
        job = Job(command, environment, directory, 1, timeout, follow)
        stack.callback(job.kill_all)

        def is_over() -> bool:
            return "committed" in seen or ("start" not in seen and _UNREACHED in job.log.read_text(errors="replace"))

        try:
            job.wait((), is_over)
        except DrillFailed as error:
            return None, None, [Finding("first save", "red", error.message)]
        code, lines = job.exit_code, job.last_lines()
    if "committed" in seen:
        steps = [event["time"] for event in job.trace.of("step") if event["rank"] == 0]
        took = seen["committed"]["time"] - seen["save"]["time"]
        step = max((after - before for before, after in itertools.pairwise(steps)), default=0.0)
        run = run_directory.read(Path(seen["start"]["run_directory"]))
        found = _measured(run)
        assert found is not None, "it is committed"
        manifests = {row.manifest.step: row.manifest for row in run.rows if row.manifest is not None}
        first = manifests.get(seen["committed"]["step"], found.manifest)  # before it ends, it may save again
        kept, to_come = _kept(seen["start"]["keep"]), found.to_come + 1 if save_every is None else 0
        found = msgspec.structs.replace(
            found, manifest=first, seconds=took, step_seconds=step, kept=kept, to_come=to_come
        )
        return found, seen["start"], []
    ended = "trains without this package" if code is None else f"ended with exit code {code} and without a save"
    then = "see the end of its output; docs/getting-started.md says how a script is reached"
    return None, seen.get("start"), [Finding("first save", "red", f"the command {ended}:\n{lines}", "a save", then)]


def _kept(policy: str) -> int | None:
    """Return how many checkpoints a policy keeps, by its description; ``None`` where that depends on the run."""
    counts = re.findall(r"count=(\d+)", policy)
    return None if re.search(r"Keep(All|Every|Within|Weights|Unless)", policy) else sum(map(int, counts))


def _described(save: Measured | None) -> Document | None:
    if save is None:
        return None
    facts = {name: getattr(save.manifest, name) for name in ("step", "bytes")}
    parts = msgspec.to_builtins(save.manifest.parts)
    return {**facts, "files": save.names, "seconds": save.seconds, "step_seconds": save.step_seconds, "parts": parts}


_STYLES = {"green": "green", "yellow": "yellow", "red": "bold red"}


def _in_words(document: Document) -> Iterator[str]:
    for each in document["checks"]:
        text = "\n       ".join(map(escape, each["found"].splitlines()))
        if each["next"]:
            text += f"; expected {escape(each['expected'])}. Next: {escape(each['next'])}"
        yield f"[{_STYLES[each['level']]}]{each['level']:6}[/] {each['check']}: {text}"
    yield f"[{_STYLES[document['verdict']]}]{document['verdict']}[/]: {escape(document['run_directory'])}"
