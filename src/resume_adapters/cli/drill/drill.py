"""Run a command undisturbed, then again with real faults.

Each run has a directory below the drill's, with its own run directory, and for each launch a log and a trace. The
faults are chosen from what the reference did: where it saved, how many file operations a save takes, how many ranks
there are.
"""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from resume_adapters.cli.drill.faults import Facts, Fault, Plan, choose
from resume_adapters.cli.drill.job import DrillFailed, Event, Job, LaunchTrace, Run, placed, require_inside
from resume_adapters.cli.run_directory import STORAGE
from resume_adapters.core.run_directory.control import ControlDirectory
from resume_adapters.errors import UnsupportedSetting

Say = Callable[[str, str | None], object]
"""Is called with what happens, and how that is to be printed."""


@dataclass(frozen=True)
class Drill:
    """What to run, and how.

    Attributes:
        command: the user's own; ``{run_dir}`` in it is replaced by the run directory.
        directory: for all that the drill writes; new or empty.
        steps: how many optimizer steps each run does; ``None``: until it ends by itself.
        faults: the kinds of faults.
        seed: decides where the faults happen.
        references: how many undisturbed runs; with two or more, what those do not repeat is judged by statistics.
        save_every: steps from one save to the next; ``None``: as the command says.
        timeout: seconds without a traced step after which a launch counts as hanging.
        environment: added to that of this process.
    """

    command: tuple[str, ...]
    directory: Path
    steps: int | None
    faults: tuple[str, ...]
    seed: int
    references: int
    save_every: int | None
    timeout: float
    environment: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Result:
    """What the runs of a drill did."""

    drill: Drill
    references: tuple[Run, ...]
    interrupted: Run
    plan: Plan
    seconds: float


def facts_of(reference: LaunchTrace, launched: int) -> Facts:
    """Read from a reference run what the choice of faults needs.

    Args:
        reference: its only launch.
        launched: the pid of the process that was launched.
    """
    saves: dict[int, int] = {}
    prunes: dict[int, int] = {}
    operations = 1
    for event in reference.events:
        kind = event["event"] if event["rank"] == 0 else ""
        if kind == "save":
            saves[event["step"]] = operations  # until its commit, which the last one may not have come to
        elif kind == "committed":
            saves[event["step"]] = operations = event["operations"]
        elif kind == "prune" and event["names"] and saves:
            prunes[max(saves)] = event["operations"]
    pids = {event["pid"] for event in reference.of("start")}
    return Facts(reference.last_step, saves, prunes, reference.world_size, launched not in pids)


def run(drill: Drill, say: Say) -> Result:
    """Run the references and the interrupted run.

    Raises:
        UnsupportedSetting: the directory is in use, or no fault can be placed.
        DrillFailed: a launch failed or hung by itself, or nothing can be compared.
    """
    began = time.monotonic()
    directory = Path(os.path.abspath(drill.directory))
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UnsupportedSetting(f"{directory} is not an empty directory: name another with --dir, or remove it")
    names = ["reference", *(f"reference-{number}" for number in range(2, drill.references + 1))]
    undisturbed = [_Runner(drill, directory / name, say) for name in names]
    references = tuple(Run((runner.launch_undisturbed(),)) for runner in undisturbed)
    plan = choose(facts_of(references[0].launches[0], undisturbed[0].launched), drill.faults, drill.seed)
    launches = _Runner(drill, directory / "interrupted", say).launch_until_done(plan.faults)
    if not any(launch.resumed_from for launch in launches):
        raise DrillFailed(
            "no launch resumed from a checkpoint, so nothing was verified: choose another --seed, do more steps "
            "(--steps N), or save more often (--save-every N)"
        )
    for fault in plan.faults[len({id(each.fault) for each in launches if each.fault}) :]:
        plan.left_out[fault.kind] = "the run was over before its turn"
    return Result(drill, references, Run(tuple(launches)), plan, time.monotonic() - began)


class _Runner:
    """Launches a command until its run is done; the run directory, the logs and the traces are below ``directory``."""

    def __init__(self, drill: Drill, directory: Path, say: Say) -> None:
        self.drill = drill
        self.directory = directory
        self.say = say
        self.run_directory = directory / "run"
        self.launched = 0  # the pid of the latest launch
        self._final = [] if drill.steps is None else [f"step:{drill.steps}"]
        self.run_directory.mkdir(parents=True)

    def launch_undisturbed(self) -> LaunchTrace:
        """Launch the command once, without a fault.

        Raises:
            DrillFailed: it failed, hangs, traced nothing, or did not finish.
        """
        trace = self._launch(1, None)
        if not trace.last_step:
            raise DrillFailed(
                "the command ended without a traced step: does it train with resume_adapters? Its output is in "
                f"{self.directory}"
            )
        if ended := self._stopped_by_itself(trace):
            raise DrillFailed(f"the undisturbed run ended before its last step: {ended}")
        return trace

    def launch_until_done(self, faults: Sequence[Fault]) -> list[LaunchTrace]:
        """Launch the same command again and again: with each fault in turn, then until the run is done.

        Raises:
            DrillFailed: a launch failed or hangs, not by a fault, or makes no progress.
        """
        launches: list[LaunchTrace] = []
        waiting = [fault for fault in faults for _ in range(2 if fault.kind == "twice" else 1)]
        while True:
            launch = self._launch(len(launches) + 1, waiting.pop(0) if waiting else None)
            done = max((each.last_step for each in launches), default=0)
            launches.append(launch)
            if launch.struck:
                continue
            ended = self._stopped_by_itself(launch)
            if not ended:
                return launches
            if launch.last_step <= done:
                raise DrillFailed(f"launch {launch.number} did no step that was not done before: {ended}")

    def _launch(self, number: int, fault: Fault | None) -> LaunchTrace:
        """Launch the command, let the fault happen, and wait for the end."""
        points = [*([fault.point] if fault else []), *self._final]
        words, variables = placed(self.drill.command, self.run_directory, self.drill.save_every)
        environment = {**self._environment(points), **variables}
        follow = functools.partial(self._follow, number)
        with ExitStack() as stack:
            job = Job(words, environment, self.directory, number, self.drill.timeout, follow)
            stack.callback(job.kill_all)
            self.launched = job.pid
            point = job.wait(points)
            struck = fault is not None and point == fault.point
            if fault is not None and struck:
                self.say(f"{self.directory.name}: {fault}", "red")
                self._strike(job, fault)
                point = job.wait(self._final)
            if point is not None:
                job.kill_all()
            elif not struck:
                job.require_success()
            return replace(job.trace, fault=fault, struck=struck)

    def _strike(self, job: Job, fault: Fault) -> None:
        if fault.kind in ("rank", "launcher", "term"):
            job.signal(signal.SIGTERM if fault.kind == "term" else signal.SIGKILL, fault.rank)
        elif fault.kind == "stop":
            *_, started = job.trace.of("start")  # it may save in a directory below that of the drill
            control = ControlDirectory(STORAGE, Path(started["run_directory"]), time.time)
            control.stop_file.request("resume-adapters drill")
            job.continue_all()
        else:
            job.kill_all()

    def _stopped_by_itself(self, trace: LaunchTrace) -> str:
        """Return why a launch ended before the run was done; empty if the run is done."""
        ends = [event for event in trace.of("end") if event["rank"] == 0]
        is_done = self.drill.steps is not None and trace.last_step >= self.drill.steps
        if is_done or not ends or ends[-1]["state"] == "finished":
            return ""
        state, step, reason = (ends[-1].get(name) for name in ("state", "step", "reason"))
        return f"it was {state} after step {step} ({reason or 'no reason given'})"

    def _environment(self, points: Sequence[str]) -> dict[str, str]:
        environment = {**os.environ, **dict(self.drill.environment)}
        environment.setdefault("RESUME_ADAPTERS_TRACE_EVERY", "1")
        environment["RESUME_ADAPTERS_PAUSE"] = " ".join(points)
        return environment

    def _follow(self, number: int, event: Event) -> None:
        if event["event"] != "start":
            return
        require_inside(event, self.run_directory)
        if event["rank"] == 0:
            begins = f"resumes from step {event['step']}" if event["step"] else "starts"
            self.say(f"{self.directory.name}: launch {number} {begins}", None)
