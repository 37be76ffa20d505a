"""The laws of exact resume, written once. Each adapter runs them with jobs of its own framework.

An adapter's tests provide a :class:`Bench`: how to start its job in a directory. The laws compare what the job traced
on every rank and for every micro-step (loss, batch digest, learning rate, all exact) and what it found at its end
(weights, log, EMA, random numbers) with an uninterrupted run of the same script.

What the arguments of a law mean that it does not explain: ``bench`` starts the job; ``directory`` is where; ``config``
is the job; ``reference`` an uninterrupted run of it, or what makes one; ``ranks`` the number of ranks; ``kill`` and
``kills`` what kills each launch; ``ignore`` names of final facts that are not compared.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import json
import os
import pickle
import re
import shutil
import signal
import struct
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from packaging.version import Version

from cycles import ROUND, WARM_UP
from device.compiled import DEVICE, NAME, require_device
from resume_adapters.core.checkpoint.manifest import describe_cursor
from resume_adapters.core.checkpoint.validity import ForeignDetector
from resume_adapters.core.dataloader.tracked import TrackedLoader
from resume_adapters.core.ranks import SingleProcess
from resume_adapters.core.run.context import RunOptions
from resume_adapters.core.run.monitor import Monitor
from resume_adapters.core.run.run import ResumableRun
from resume_adapters.core.saving.engine import SaveEngine
from resume_adapters.core.session.session import Session
from resume_adapters.errors import MissingFramework
from staged import OPTIONS, STAGE

from faults import DAMAGES, flip
from launch import LONG, Outcome, Running, Server, start_fresh

Config = dict[str, Any]
Kill = dict[str, Any]


@dataclass(frozen=True)
class Trace:
    """What a job traced: each rank's micro-steps in the order in which they ran, and what it found at its end.

    Attributes:
        steps: of each rank, its micro-steps.
        final: of each rank, what it found at its end.
        evaluated: of each rank, the step of each batch of an evaluation, where the job traces that.
    """

    steps: tuple[tuple[dict[str, Any], ...], ...]
    final: tuple[dict[str, Any] | None, ...]
    evaluated: tuple[tuple[int, ...], ...] = ()

    @property
    def first_step(self) -> int:
        return int(self.steps[0][0]["step"]) if self.steps[0] else -1


@dataclass
class Bench:
    """How an adapter starts its job.

    Args:
        server: has imported the framework.
        script: the job.
        run_directory: name of the run directory in the job's working directory.
        options: where a configuration has the options of the package.
        staged: how the saves of jobs leave the training that do not say so.
    """

    server: Server
    script: Path
    run_directory: str = "out"
    options: str = "callback"
    staged: Mapping[str, str] = field(default_factory=lambda: OPTIONS)

    def start(
        self,
        directory: Path,
        config: Config,
        *,
        ranks: int = 1,
        nodes: int = 1,
        env: dict[str, str] | None = None,
        fresh: bool = False,
    ) -> Running:
        """Start the job in ``directory``, with an empty trace; ``fresh``: in interpreters of its own."""
        if config.get("device", "cpu") != "cpu":
            require_device(ranks)
            config, fresh = {**config, "device": DEVICE}, fresh or DEVICE != NAME  # a driver survives no fork
        directory.mkdir(parents=True, exist_ok=True)
        for old in directory.glob("trace.*"):
            old.unlink()
        file = directory / "config.json"
        staged = {self.options: {**self.staged, **config.get(self.options, {})}} if self.staged else {}
        file.write_text(json.dumps({**config, **staged}))
        start = start_fresh if fresh else functools.partial(self.server.start, nodes=nodes)
        return start(self.script, [file.name], directory, ranks, env or {})

    def run(self, directory: Path, config: Config, **options: Any) -> Outcome:
        """Run the job to its end, whatever that is; the options are those of :meth:`start`."""
        return self.start(directory, config, **options).wait()


def read_trace(directory: Path, ranks: int = 1) -> Trace:
    """Read what the last launch in ``directory`` traced."""
    steps, finals, evaluated = [], [], []
    for rank in range(ranks):
        file = directory / f"trace.{rank}"
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        steps.append(tuple(line for line in lines if "loss" in line))
        finals.append(next((line for line in lines if line.get("final")), None))
        evaluated.append(tuple(line["validated"] for line in lines if "validated" in line))
    return Trace(tuple(steps), tuple(finals), tuple(evaluated))


class References:
    """Reference runs, each run once and shared by a session's tests.

    Args:
        directory: makes a directory of its own for each.
    """

    def __init__(self, bench: Bench, directory: Callable[[str], Path]) -> None:
        self._bench = bench
        self._directory = directory
        self._known: dict[str, tuple[Trace, Path]] = {}

    def __call__(self, config: Config, ranks: int = 1) -> Trace:
        """Return the trace of an uninterrupted run of a configuration."""
        return self._run(config, ranks)[0]

    def directory(self, config: Config, ranks: int = 1) -> Path:
        """Return where that run was made. Who changes something there works on a copy."""
        return self._run(config, ranks)[1]

    def _run(self, config: Config, ranks: int) -> tuple[Trace, Path]:
        key = json.dumps([config, ranks], sort_keys=True)
        if key not in self._known:
            directory = self._directory("reference")
            self._known[key] = uninterrupted(self._bench, directory, config, ranks=ranks), directory
        return self._known[key]


@pytest.fixture(scope="session")
def reference(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(bench, tmp_path_factory.mktemp)


class Killed:
    """What killed jobs left, each killed once and copied by a session's tests.

    Args:
        directory: makes a directory of its own for each.
    """

    def __init__(self, bench: Bench, directory: Callable[[str], Path]) -> None:
        self._bench = bench
        self._directory = directory
        self._known: dict[str, Path] = {}

    def __call__(self, target: Path, config: Config, ranks: int = 1) -> None:
        """Let a directory hold what a job left that was killed as its configuration says."""
        key = json.dumps([config, ranks], sort_keys=True)
        if key not in self._known:
            directory = self._directory("killed")
            assert self._bench.run(directory, config, ranks=ranks).killed
            assert committed(directory / self._bench.run_directory)
            self._known[key] = directory
        shutil.copytree(self._known[key], target, symlinks=True, dirs_exist_ok=True)


@pytest.fixture(scope="session")
def killed(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Killed:
    return Killed(bench, tmp_path_factory.mktemp)


def uninterrupted(bench: Bench, directory: Path, config: Config, *, ranks: int = 1) -> Trace:
    """Run the job once, without a kill: the reference."""
    bench.run(directory, config, ranks=ranks).require_success()
    trace = read_trace(directory, ranks)
    assert all(trace.final), "the reference did not reach its end"
    return trace


def committed(run_directory: Path) -> dict[str, int]:
    """Return the committed checkpoints of a run directory, by name, with their steps."""
    inside = {marker.parent.parent: marker for marker in run_directory.glob("*/resume/manifest.json")}
    beside = {marker.parent.with_suffix(""): marker for marker in run_directory.glob("?*.resume/manifest.json")}
    return {
        path.name: int(json.loads(marker.read_bytes())["manifest"]["step"])
        for path, marker in {**inside, **beside}.items()
        if not path.is_symlink()
    }


def parts(run_directory: Path) -> dict[str, str]:
    """Return what the newest checkpoint says of each part of the state, by name: who saves it, and what it is."""
    manifests = [json.loads(file.read_bytes())["manifest"] for file in run_directory.rglob("manifest.json")]
    newest = max(manifests, key=lambda manifest: int(manifest["step"]))
    found: dict[str, list[str]] = {}
    for each in newest["parts"]:
        found.setdefault(each["name"], []).append(f"{each['by']}: {each['note']}")
    return {name: "; ".join(notes) for name, notes in found.items()}


def interrupted_equals_uninterrupted(
    bench: Bench,
    directory: Path,
    config: Config,
    reference: Trace,
    kills: Sequence[Kill],
    *,
    ranks: int = 1,
    relaunch: Sequence[Config] = (),
    ignore: Sequence[str] = (),
) -> None:
    """Laws 1 and 2: a run killed at any step, any number of times, continues as if it never was.

    Each kill must fall behind the newest checkpoint (its step is not one of a save), and each launch after it must
    start from that checkpoint, not from an older one or from nothing.

    Args:
        relaunch: for each launch (the first included) what differs in its configuration.
    """
    variants = [*relaunch, *[{} for _ in range(len(kills) + 1 - len(relaunch))]]
    saved: dict[str, str] = {}
    for number, kill in enumerate([*kills, None]):
        anchor = max(committed(directory / bench.run_directory).values(), default=0)
        outcome = bench.run(directory, {**config, **variants[number], "kill": kill}, ranks=ranks)
        trace = read_trace(directory, ranks)
        if kill is None:
            outcome.require_success()
        else:
            assert outcome.killed, f"launch {number} was not killed: {outcome.statuses}\n{outcome.output[-6000:]}"
        told = re.findall(r"(\S+) resumed at (.*)\.", outcome.output)
        assert told or relaunch or not anchor
        for name, cursor in told:
            assert saved[name] == cursor, "where in the data it resumes is not where it said that it was saved"
        saved |= _places_of_commits(directory / bench.run_directory)
        require_same_steps(trace, reference, start=anchor)
    require_same_end(trace, reference, ignore)


def _places_of_commits(run_directory: Path) -> dict[str, str]:
    """Return where in the data each checkpoint was saved, in words, as the journal has it."""
    lines = (run_directory / ".resume" / "journal.jsonl").read_text().splitlines()
    commits = [each for line in lines if (each := json.loads(line))["event"] == "commit"]
    return {each["checkpoint"]: describe_cursor(each.get("cursor", {})) for each in commits}


def trains_on_after_a_failed_save(
    bench: Bench, directory: Path, config: Config, reference: Trace, *, ranks: int = 1, ignore: Sequence[str] = ()
) -> None:
    """With ``on_save_error="continue"``: the save of step 5 fails, and the run ends as if it had not.

    Args:
        config: the job, which saves every five steps, with the limit on file sizes that stands in for a full disk.
    """
    outcome = bench.run(directory, {**config, "file_limit_until": 7}, ranks=ranks)
    outcome.require_success()
    assert outcome.output.count("Training continues") == 1 and "File too large" in outcome.output, outcome.output
    trace = read_trace(directory, ranks)
    require_same_steps(trace, reference, start=0)
    require_same_end(trace, reference, ignore)
    steps = set(committed(directory / bench.run_directory).values())
    assert 5 not in steps and 10 in steps, steps


def require_same_steps(trace: Trace, reference: Trace, start: int) -> None:
    """Every micro-step from step ``start`` on has the loss, the batch and the learning rate of the reference."""
    for rank, (lines, expected) in enumerate(zip(trace.steps, reference.steps, strict=True)):
        following = [line for line in expected if line["step"] >= start]
        # Where the job counts them, it may have been saved within an accumulation window.
        if lines and lines[0]["step"] == start and "micro" in lines[0]:
            following = [line for line in following if (line["step"], line["micro"]) >= (start, lines[0]["micro"])]
        assert lines or not following, f"rank {rank} did nothing after step {start}"
        for line, wanted in zip(lines, following, strict=False):
            assert line == wanted, f"rank {rank} first differs at step {wanted['step']}:\n{line}\n{wanted}"
        assert len(lines) <= len(following), f"rank {rank} did {len(lines)} micro-steps, the reference {len(following)}"


def require_same_end(trace: Trace, reference: Trace, ignore: Sequence[str] = ()) -> None:
    """The last launch ended as the reference did: weights, log, averages, best, and the next random numbers."""
    for rank, (found, expected) in enumerate(zip(trace.final, reference.final, strict=True)):
        assert found is not None, f"rank {rank} did not reach its end"
        assert expected is not None
        for name in expected:
            if name not in ignore:
                assert found[name] == expected[name], f"rank {rank}: {name} differs:\n{found[name]}\n{expected[name]}"


def resumed_equals_uninterrupted(
    bench: Bench, directory: Path, config: Config, reference: Trace, *, ranks: int = 1, ignore: Sequence[str] = ()
) -> int:
    """Launch once more what was killed or stopped, to the end; return the step from which it went on."""
    anchor = max(committed(directory / bench.run_directory).values(), default=0)
    bench.run(directory, config, ranks=ranks).require_success()
    trace = read_trace(directory, ranks)
    require_same_steps(trace, reference, start=anchor)
    require_same_end(trace, reference, ignore)
    return anchor


def an_empty_machine_resumes(
    bench: Bench, directory: Path, config: Config, reference: Trace, kill: Kill, *, ranks: int = 1
) -> None:
    """Killed, and started by the same command where the run directory is gone, a run continues from its mirror."""
    mirror = directory / "bucket"
    env = {"RESUME_ADAPTERS_MIRROR": f"file://{mirror}"}
    outcome = bench.run(directory, {**config, "kill": kill}, ranks=ranks, env=env)
    assert outcome.killed, outcome.output[-6000:]
    manifests = [json.loads(file.read_bytes())["manifest"] for file in mirror.rglob("manifest.json")]
    assert manifests, f"nothing was copied\n{outcome.output[-6000:]}"
    copied = max(manifest["step"] for manifest in manifests)
    shutil.rmtree(directory / bench.run_directory)
    outcome = bench.run(directory, config, ranks=ranks, env=env)
    outcome.require_success()
    trace = read_trace(directory, ranks)
    assert trace.first_step == copied > 0, (trace.first_step, copied)
    require_same_steps(trace, reference, start=copied)
    require_same_end(trace, reference, ["files"])  # the older checkpoints stay in the mirror
    last = max(committed(directory / bench.run_directory).values())
    assert last in [json.loads(file.read_bytes())["manifest"]["step"] for file in mirror.rglob("manifest.json")]


def _own_disks() -> bool:
    """Return whether this machine lets a process have mounts of its own."""
    return shutil.which("unshare") is not None and subprocess.run(["unshare", "-m", "true"]).returncode == 0


needs_own_disks = pytest.mark.skipif(not _own_disks(), reason="mount namespaces need more rights than there are here")


def nodes_with_own_disks_resume(
    bench: Bench, directory: Path, config: Config, reference: Trace, kill: Kill, *, ranks: int = 2, empty: bool = False
) -> None:
    """Killed, and launched again where one of two nodes has lost its newest checkpoint: all take the one before.

    Args:
        empty: the node has lost all that it had, and gets the newest from the other.
    """
    config = {**config, "own_disk": True}
    outcome = bench.run(directory, {**config, "kill": kill}, ranks=ranks, nodes=2)
    assert outcome.killed, outcome.output[-6000:]
    disks = [directory / f"disk.{node}" for node in range(2)]
    left, other = (committed(disk) for disk in disks)
    assert left == other and len(left) > 1, f"{left}, {other}"
    *_, (step, _), (newest, lost) = sorted((step, name) for name, step in left.items())
    for path in [disks[1]] if empty else disks[1].glob(f"{lost}*"):  # Lightning's file, and what is beside it
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    disks[1].mkdir(exist_ok=True)
    outcome = bench.run(directory, config, ranks=ranks, nodes=2).require_success()
    step, said = (newest, "is fetched from another node") if empty else (step, "is damaged: rank {}: is not there")
    assert f"{lost} {said.format(ranks // 2)}" in outcome.output
    trace = read_trace(directory, ranks)
    assert trace.first_step == step, (trace.first_step, step)
    require_same_steps(trace, reference, start=step)
    require_same_end(trace, reference, ["files"])  # what is set aside is one of them
    left, other = (committed(disk) for disk in disks)
    assert left.items() >= other.items() if empty else left == other
    assert max(other.values()) > step


def weights_alone_are_kept(
    bench: Bench,
    directory: Path,
    config: Config,
    reference: References,
    kill: Kill,
    load: Callable[[Path], Mapping[str, Any]],
) -> None:
    """With ``KeepWeights``, a killed run goes on as if undisturbed; older checkpoints have the weights of their steps.

    Args:
        kill: kills the run more than a step behind a save, of which each fifth step has one.
        load: loads the weights of a checkpoint by the bare framework.
    """
    run_directory, keep = directory / bench.run_directory, {"keep": "KeepLast(1) | KeepWeights(KeepEvery(5))"}
    outcome = bench.run(directory, {**config, **keep, "kill": kill})
    assert outcome.killed and "keeps all of its state" not in outcome.output, outcome.output[-6000:]
    newest = kill["step"] // 5 * 5
    assert _weights_only(run_directory) == {step: step < newest for step in range(5, newest + 1, 5)}
    assert resumed_equals_uninterrupted(bench, directory, {**config, **keep}, reference(config)) == newest
    undisturbed = reference.directory(config) / bench.run_directory
    for name, step in committed(run_directory).items():
        if _weights_only(run_directory)[step]:
            found, expected = load(run_directory / name), load(undisturbed / name)
            assert found.keys() == expected.keys() and len(found) > 1
            assert all(torch.equal(found[key], expected[key]) for key in expected), f"the weights of {name}"
            assert [_has_moments(each / name) for each in (run_directory, undisturbed)] == [False, True]
        else:
            for path in (run_directory / name, run_directory / f"{name}.resume"):
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    outcome = bench.run(directory, {**config, **keep})
    assert any(outcome.statuses) and "has weights alone" in outcome.output, outcome.output[-6000:]
    assert not read_trace(directory).steps[0], "it began from zero"


def _weights_only(run_directory: Path) -> dict[int, bool]:
    """Return whether each committed checkpoint has weights alone, by its step."""
    files = [*run_directory.glob("*/resume/manifest.json"), *run_directory.glob("?*.resume/manifest.json")]
    manifests = [json.loads(file.read_bytes())["manifest"] for file in files if not file.parents[1].is_symlink()]
    return {each["step"]: each["weights_only"] for each in manifests}


def _has_moments(checkpoint: Path) -> bool:
    """Return whether a file of a checkpoint has what AdamW keeps of each parameter."""
    files = [checkpoint] if checkpoint.is_file() else [file for file in checkpoint.rglob("*") if file.is_file()]
    return any(b"exp_avg_sq" in file.read_bytes() for file in files)


def a_kill_loses_no_step_that_memory_has(
    bench: Bench, directory: Path, config: Config, reference: Trace, kill: Kill, *, ranks: int = 1
) -> None:
    """Killed between two saves to the disk, a run continues from the last step, which was saved to memory alone.

    Args:
        kill: when it is killed, more than a step behind a save.
    """
    env = {"RESUME_ADAPTERS_MIRROR": "memory:1"}
    outcome = bench.run(directory, {**config, "kill": kill}, ranks=ranks, env=env)
    assert outcome.killed, outcome.output[-6000:]
    run_directory = directory / bench.run_directory
    identity = (run_directory / ".resume" / "identity").read_text().split()[0]
    memory = Path(f"/dev/shm/resume-adapters-{os.geteuid()}", identity)
    held, on_disk = (max(committed(each).values(), default=0) for each in (memory, run_directory))
    assert held > on_disk, f"{held} in memory, {on_disk} on the disk\n{outcome.output[-6000:]}"
    bench.run(directory, config, ranks=ranks, env=env).require_success()
    trace = read_trace(directory, ranks)
    assert trace.first_step == held, (trace.first_step, held)
    require_same_steps(trace, reference, start=held)
    require_same_end(trace, reference)
    assert not memory.exists()


@dataclass(frozen=True)
class Operation:
    """Something that a job does to its run directory, and where the next launch goes on if it is killed before.

    Attributes:
        event: the audit event.
        path: a regular expression of the path in the run directory.
        anchor: the step from which the next launch goes on.
        number: which of several alike, counted from 1.
    """

    event: str
    path: str
    anchor: int
    number: int = 1


BEGUN = r"\.resume/begin-[0-9a-f]+/"
"""A regular expression of where a checkpoint is until it has its name."""


def temporary(name: str) -> str:
    """Return a regular expression of the file that is written to be renamed to a name."""
    return rf"\.{re.escape(name)}\.[0-9a-f]+\.tmp"


def operations(
    first: str, second: str, inner: str, native: Operation, *, saves: int = 1, superseded: tuple[str, int] | None = None
) -> dict[str, Operation]:
    """Return one operation of each kind of a start, a save, a commit and a prune.

    They are those of a job that saves at the steps 2, 4 and 6 and keeps the newest alone.

    Args:
        first: name of the checkpoint of step 2.
        second: name of the checkpoint of step 4.
        inner: the directory of what the package adds to that.
        native: what writes a file of the framework in it.
        saves: how many checkpoints each save makes.
        superseded: a checkpoint that is saved again under its name, and the step from which a launch goes on that was
            killed meanwhile.
    """
    first, second, inner = re.escape(first), re.escape(second), re.escape(inner)
    found = {
        "claims the run directory": Operation("os.rename", rf"\.resume/{temporary('generation')}", 0),
        "begins a checkpoint": Operation("open", rf"{BEGUN}{inner}/pending", 2),
        "lets the framework write": native,
        "writes a file of its own": Operation("open", rf"{BEGUN}{inner}/rank-00000\.json", 2),
        "gives it its name": Operation("os.rename", rf"{BEGUN}{second}", 2),
        "writes the manifest": Operation("open", rf"{BEGUN}{inner}/{temporary('manifest.json')}", 2),
        "commits": Operation("os.rename", rf"{inner}/{temporary('manifest.json')}", 2),
        "takes the mark of the unfinished away": Operation("os.remove", rf"{inner}/pending", 4),
        "moves latest": Operation("os.rename", temporary("latest"), 4, saves + 1),
        "writes the commit into the journal": Operation("open", r"\.resume/journal\.jsonl", 4, 2 + saves + 1),
        "takes the checkpoint before out of sight": Operation("os.rename", first, 4),
        "removes its files": Operation("os.remove", rf"\.resume/remove-[0-9a-f]+-{first}(/resume/manifest\.json)?", 4),
        "removes its directory": Operation("os.rmdir", rf"\.resume/remove-[0-9a-f]+-{first}(\.resume)?", 4),
        "says that it has finished": Operation("os.rename", rf"\.resume/{temporary('status.json')}", 6, 3),
    }
    if superseded is not None:
        again, anchor = re.escape(superseded[0]), superseded[1]
        found |= {
            "moves a checkpoint aside to save it again": Operation("os.rename", again, anchor),
            "gives the new one its name": Operation("os.rename", rf"{BEGUN}{again}", anchor, 2),
            "takes the one aside out of sight": Operation("os.rename", rf"{again}\.superseded", anchor),
        }
    return found


def killed_before_an_operation(
    bench: Bench,
    directory: Path,
    config: Config,
    reference: Trace,
    operation: Operation,
    *,
    leaving: Sequence[set[int]],
    ranks: int = 1,
    of_the_end: Sequence[str] = (),
) -> None:
    """Law 3: a kill before any operation on the run directory leaves its newest committed checkpoint to go on from.

    The tests of the core take every operation. Here a real job is killed before one of each kind.

    Args:
        leaving: the steps of which the relaunched run may leave checkpoints. A kill between the last commit and its
            prune may leave one more than asked for, never one less.
        of_the_end: names of final facts that go with a process that is killed behind its last save.
    """
    wanted = [operation.event, operation.path, operation.number]
    outcome = bench.run(directory, {**config, "kill_at_operation": wanted}, ranks=ranks)
    assert outcome.killed, f"the job did nothing like {operation}:\n{outcome.output[-6000:]}"
    record = directory / bench.run_directory / ".resume" / "status.json"
    finished = record.exists() and json.loads(record.read_bytes())["state"] == "finished"
    ignore = of_the_end if finished else ()
    anchor = resumed_equals_uninterrupted(bench, directory, config, reference, ranks=ranks, ignore=ignore)
    assert anchor == operation.anchor
    left = set(committed(directory / bench.run_directory).values())
    assert left in leaving, f"the run left {left}"


FORKS = ("weights", "weights+optimizer")
"""What a new run may take of another."""


def a_fork_equals_loading_by_hand(
    bench: Bench,
    directory: Path,
    config: Config,
    references: References,
    take: str,
    kill: Kill,
    *,
    changes: Config,
    ranks: int = 1,
    ignore: Sequence[str] = (),
) -> None:
    """A new run that begins with what another has learnt is the script that loads that by itself, however it is killed.

    It is killed twice where it has no checkpoint, the second time before its first commit, and once right after that.
    From then on the other run is gone.

    Args:
        config: the other run, which saves at the step 10.
        take: what it takes.
        changes: what differs in the new run, which saves at the step 5.
        ranks: on how many it trains; the other has trained on one.
    """
    other = directory / "other"
    shutil.copytree(references.directory(config) / bench.run_directory, other, symlinks=True)
    name = next(name for name, step in committed(other).items() if step == 10)
    given = {"path": str(other / name), "take": take}
    mine = {**config, **changes}
    expected = uninterrupted(bench, directory / "by hand", {**mine, "bare": True, "loads": given}, ranks=ranks)
    assert expected.steps[0][0]["loss"] != references(config).steps[0][0]["loss"], "nothing was loaded"
    forking, run = {**mine, "resume": given}, directory / "fork"
    kills: list[tuple[str, Any, int]] = [
        ("kill", {**kill, "step": 2}, 0),
        ("kill_at_operation", ["os.rename", f".*/{temporary('manifest.json')}", 1], 0),
        ("kill_at_operation", ["os.rename", temporary("latest"), 1], 1),
    ]
    for by, wanted, left in kills:
        outcome = bench.run(run, {**forking, by: wanted}, ranks=ranks)
        assert outcome.killed, outcome.output[-6000:]
        assert len(committed(run / bench.run_directory)) == left
        assert "This run begins with" in outcome.output
        require_same_steps(read_trace(run, ranks), expected, start=0)
    shutil.rmtree(other)
    assert resumed_equals_uninterrupted(bench, run, forking, expected, ranks=ranks, ignore=ignore) == 5
    for file in (run / bench.run_directory).rglob("manifest.json"):
        found = json.loads(file.read_bytes())["manifest"]["ancestry"]
        assert (found["run"], found["checkpoint"], found["step"]) == (str(other), name, 10)
        assert found["taken"] == ["model", "optimizer"][: 1 + (take != "weights")] and "rng" in found["fresh"]


FLIPS = ("weights", "gradients", "moments")
"""Where a bit is flipped on one rank."""


def an_audit_finds_a_flipped_bit(bench: Bench, directory: Path, config: Config, reference: Any, what: str) -> None:
    """What differs on one rank ends the run before it is saved, and a relaunch goes on from what was not yet wrong.

    Args:
        what: one of :data:`FLIPS`.
    """
    every, found_at = (4, 8) if what == "weights" else (100, 10)  # at the next save, where none is due before
    audited = {**config, bench.options: {**config.get(bench.options, {}), "verify": {"every": every}}}
    outcome = bench.run(directory, {**audited, "flip": {"what": what, "step": 7}}, ranks=2)
    assert not outcome.killed and any(outcome.statuses), outcome.output[-6000:]
    assert f"ReplicasDiffer: after step {found_at} ranks 0 (" in outcome.output, outcome.output[-6000:]
    assert set(committed(directory / bench.run_directory).values()) == {5}
    bench.run(directory, audited, ranks=2).require_success()
    trace, expected = read_trace(directory, 2), reference(config, 2)
    require_same_steps(trace, expected, start=5)
    require_same_end(trace, expected)


def frozen_before_an_operation(
    bench: Bench, directory: Path, config: Config, reference: Trace, operation: Operation, *, ignore: Sequence[str] = ()
) -> None:
    """A job that is frozen in a save, and wakes up when a second launch has trained to the end, harms nothing.

    The tests of the core take every operation. Here a real job is frozen before one.
    """
    run_directory = directory / bench.run_directory
    wanted = [operation.event, operation.path, operation.number, "SIGSTOP"]
    frozen = bench.start(directory, {**config, "kill_at_operation": wanted})
    try:
        frozen.wait_until_stopped()
        anchor = max(committed(run_directory).values(), default=0)
        assert anchor == operation.anchor
        bench.run(directory, config).require_success()
        trace, before = read_trace(directory), _content(run_directory)
        require_same_steps(trace, reference, start=anchor)
        require_same_end(trace, reference, ignore)
    finally:
        frozen.signal(signal.SIGCONT)
    outcome = frozen.wait()
    assert outcome.statuses != (0,) and "FencedOff" in outcome.output, outcome.output[-6000:]
    assert _content(run_directory) == before, "it has changed what the second launch saved"
    left = [path.name for path in (run_directory / ".resume").iterdir() if path.name.startswith(("begin-", "remove-"))]
    assert not left


def _content(run_directory: Path) -> dict[str, bytes]:
    """Return the files of the checkpoints, and the status, by path."""
    files = [file for file in run_directory.rglob("*") if file.is_file() and not file.is_symlink()]
    paths = {file.relative_to(run_directory).as_posix(): file for file in files}
    journal = ".resume/journal.jsonl"  # to which whoever wakes up may add
    return {path: file.read_bytes() for path, file in sorted(paths.items()) if path != journal}


def damaged_is_passed_over(
    bench: Bench,
    directory: Path,
    source: Path,
    config: Config,
    damage: Callable[[Path], None],
    file: str,
    *,
    newest: str,
    before: str,
    ranks: int = 1,
) -> Outcome:
    """Law 4: a damaged file of the newest checkpoint is named, and the checkpoint before is resumed from.

    Args:
        source: what a killed job left, with whole checkpoints; it is copied.
        config: the job; it may be told to die early.
        file: the file, relative to the run directory.
        newest: name of the newest checkpoint, to which the file belongs.
    """
    shutil.copytree(source, directory, symlinks=True)
    run_directory = directory / bench.run_directory
    damage(run_directory / file)
    outcome = bench.run(directory, config, ranks=ranks)
    assert f"{newest} is damaged" in outcome.output and Path(file).name in outcome.output, outcome.output
    assert f"Resuming from {before}." in outcome.output
    set_aside = [path.name for path in (run_directory / ".resume" / "set-aside").iterdir()]
    assert any(name.startswith(newest) for name in set_aside), "nothing may be lost"
    return outcome


def every_damage_is_found(
    source: Path, directory: Path, files: Sequence[str], foreign: ForeignDetector, *, newest: str, before: str
) -> None:
    """Law 4, asked in this process: whatever befalls a file, its checkpoint is set aside and the one before is chosen.

    Args:
        source: a run directory with whole checkpoints; it is copied.
        files: the files of the newest checkpoint, relative to the run directory.
        foreign: the adapter's detector of checkpoints that the package did not write.
    """
    for file in files:
        for kind, damage in DAMAGES.items():
            shutil.copytree(source, directory, symlinks=True)
            damage(directory / file)
            run = ResumableRun(directory, RunOptions(foreign=foreign), ranks=SingleProcess())
            choice = run.open()
            run.close()
            assert choice.checkpoint is not None and choice.checkpoint.path.name == before, f"{file} {kind}"
            assert [each.path.name for each in choice.rejected] == [newest], f"{file} {kind}"
            reason = choice.rejected[0].reason
            assert Path(file).name in reason, f"{file} {kind}, and the reason does not say so: {reason}"
            set_aside = [path.name for path in (directory / ".resume" / "set-aside").iterdir()]
            assert any(name.startswith(newest) for name in set_aside), f"{file} {kind}: nothing may be lost"
            assert newest not in committed(directory), f"{file} {kind}"
            shutil.rmtree(directory)


WHOM: dict[str, Kill] = {
    "every rank": {},
    "rank 0 alone": {"rank": 0},
    "rank 1 alone": {"rank": 1},
    "a step apart": {"apart": 1},
}
"""Which ranks a signal reaches, and when."""


def stopped_then_resumed(
    bench: Bench,
    directory: Path,
    config: Config,
    reference: Trace,
    *sends: Kill,
    ranks: int = 1,
    within: int = 2,
) -> None:
    """Law 8: a request to stop saves, then leaves, on all ranks together; the next launch goes on exactly.

    Args:
        sends: which signal each launch sends itself, at what event of which step, on one rank or on all. The launch
            after the last runs to the end. ``validated`` is in how many batches of an evaluation it must have left.
        within: steps within which it must have saved.
    """
    # Of shorter steps ranks vote on some only, and a commit in the background lasts for many.
    pace = {"slow": 0.06 if ranks > 1 else 0.03}
    run_directory, start = directory / bench.run_directory, 0
    for send in sends:
        outcome = bench.run(directory, {**config, **pace, "send": send}, ranks=ranks)
        assert set(outcome.statuses) == {0}, f"{send}: {outcome.statuses}\n{outcome.output[-6000:]}"
        trace = read_trace(directory, ranks)
        assert trace.final == (None,) * ranks, f"{send}: a stopped run must not go on as if it had finished"
        status = json.loads((run_directory / ".resume" / "status.json").read_bytes())
        if status.get("step", 0) > start:  # else it was asked before its first step
            require_same_steps(trace, reference, start=start)
        start = max(committed(run_directory).values(), default=0)
        found = (status["state"], status.get("step", 0), status["reason"])
        assert found == ("stopped", start, send.get("send", "SIGTERM"))
        assert send["step"] <= start <= send["step"] + send.get("within", within), f"{send}: saved at {start}"
        for evaluated in trace.evaluated if "validated" in send else ():
            batches = evaluated.count(send["step"])
            assert batches <= send["validated"], f"{send}: the evaluation went on for {batches} batches"
    resumed_equals_uninterrupted(bench, directory, config, reference, ranks=ranks)


def asked_at_its_end_finishes(bench: Bench, directory: Path, reference: Trace, send: Kill) -> None:
    """A run that is asked to stop when nothing is left to train finishes, and the same launch has nothing to do.

    Args:
        bench: how to start the job.
        directory: where.
        reference: an uninterrupted run of the job with its defaults.
        send: the event and its step.
    """
    run_directory = directory / bench.run_directory
    bench.run(directory, {"send": send}).require_success()
    require_same_end(read_trace(directory), reference)
    status = json.loads((run_directory / ".resume" / "status.json").read_bytes())
    last = max(committed(run_directory).values())
    assert (status["state"], status["step"], status["last_commit"]) == ("finished", last, last)
    assert "nothing to do" in bench.run(directory, {}).require_success().output


def laws_in_fresh_interpreters(
    bench: Bench,
    directory: Path,
    config: Config,
    reference: Trace,
    *,
    commit: Operation,
    damaged: str,
    send: Kill,
) -> None:
    """Laws 1 to 4 and 8 in one chain of launches, each as a user starts it: what a forking server hides shows here.

    A launch is killed before a commit, and then the newest of its checkpoints is damaged. The next passes that over, is
    asked to stop, saves and leaves. The last runs to the end.

    Args:
        commit: the commit before which the first launch is killed, behind two others.
        damaged: a file of the newest checkpoint that it leaves, relative to the run directory.
        send: what stops the second launch.
    """
    run_directory = directory / bench.run_directory

    def launch(**changes: Any) -> tuple[Outcome, Trace]:
        outcome = bench.run(directory, {**config, **changes}, fresh=True)
        trace = read_trace(directory)
        require_same_steps(trace, reference, start=trace.first_step)
        return outcome, trace

    outcome, trace = launch(kill_at_operation=[commit.event, commit.path, commit.number])
    assert outcome.killed and trace.first_step == 0, outcome.output[-6000:]
    before, newest = sorted(committed(run_directory).values())
    assert newest == commit.anchor

    flip(run_directory / damaged)
    outcome, trace = launch(send=send, slow=0.03)
    assert outcome.statuses == (0,) and trace.final == (None,) and trace.first_step == before, outcome.output[-6000:]
    assert " is damaged: " in outcome.output and Path(damaged).name in outcome.output
    stopped = max(committed(run_directory).values())
    assert newest < send["step"] <= stopped <= send["step"] + 2

    outcome, trace = launch()
    assert outcome.require_success() and trace.first_step == stopped
    require_same_end(trace, reference)


STORED = Path(__file__).parent / "stored"
"""Run directories that an older version of the package has saved; see its README.md."""


def older_run_goes_on(
    bench: Bench, directory: Path, reference: Callable[[Config], Trace], adapter: str, installed: str
) -> None:
    """A run that an older version of the package began, and that was killed, continues as if it never was.

    Where another processor or another torch gives other losses than those that the older run has traced before its
    kill, the losses and the weights that follow cannot be compared, and only the rest is.

    Args:
        adapter: whose run it is.
        installed: the version of its framework here; an older one than that of the run need not read its files.
    """
    shutil.copytree(STORED / adapter, directory, symlinks=True)
    config = json.loads((directory / "config.json").read_text())
    del config["kill"]
    older, expected = read_trace(directory), reference(config)
    saved = committed(directory / bench.run_directory)
    manifests = [json.loads(file.read_bytes())["manifest"] for file in directory.rglob("manifest.json")]
    (framework,) = {manifest["framework"].split()[1] for manifest in manifests}
    if Version(installed) < Version(framework):
        pytest.skip(f"the run was saved with version {framework}, and {installed} is installed")
    assert {manifest["format"] for manifest in manifests} == {1}
    outcome = bench.run(directory, config).require_success()
    trace = read_trace(directory)
    assert trace.first_step == max(saved.values()) > 0
    assert " is damaged" not in outcome.output, outcome.output
    known = expected.steps[0][: len(older.steps[0])]
    if older.steps[0] == known:
        require_same_steps(trace, expected, start=trace.first_step)
        require_same_end(trace, expected)
    else:
        assert [_without_loss(line) for line in older.steps[0]] == [_without_loss(line) for line in known]
        following = [_without_loss(line) for line in expected.steps[0] if line["step"] >= trace.first_step]
        found = [_without_loss(line) for line in trace.steps[0]]
        assert found == following[len(following) - len(found) :]
        for final, wanted in zip(trace.final, expected.final, strict=True):
            assert final is not None and wanted is not None and final["draws"] == wanted["draws"]


def _without_loss(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name != "loss"}


def same_samples_on_any_topology(
    bench: Bench, directory: Path, reference: Trace, launches: Sequence[tuple[int, Config]], *, tolerance: float | None
) -> None:
    """Law 7: on a different number of ranks or workers, each optimizer step has the same samples and the same rate.

    Args:
        reference: an uninterrupted run, which traced the rows of each batch and their mean loss, and it may be the
            values of its final weights.
        launches: for each launch the number of ranks and the whole configuration; all but the last are killed.
        tolerance: by how much the mean loss of a step, and each final weight, may differ, where there is no dropout;
            ``None``: by anything, and samples that are trained on twice, as the last batch of a pass is filled up, do
            not count.
    """
    expected = _steps(reference)
    for number, (ranks, config) in enumerate(launches):
        anchor = max(committed(directory / bench.run_directory).values(), default=0)
        outcome = bench.run(directory, config, ranks=ranks)
        if number < len(launches) - 1:
            assert outcome.killed, outcome.output
        else:
            outcome.require_success()
        found = _steps(read_trace(directory, ranks))
        assert found, f"launch {number} did nothing"
        assert min(found) == anchor
        if number == len(launches) - 1:
            assert max(found) == max(expected), "the run has as many steps as ever"
        for step in sorted(found)[: None if number == len(launches) - 1 else -1]:  # the kill fell in the last one
            (rows, rates, loss), (rows_expected, rates_expected, loss_expected) = found[step], expected[step]
            if tolerance is None:
                rows, rows_expected = sorted({*rows} & {*rows_expected}), sorted({*rows_expected})
            assert rows == rows_expected, f"launch {number} on {ranks} ranks has other samples at step {step}"
            assert rates == rates_expected, f"launch {number} has another learning rate at step {step}"
            assert tolerance is None or abs(loss - loss_expected) <= tolerance, f"step {step}: {loss} {loss_expected}"
    values = [(trace.final[0] or {}).get("values") for trace in (read_trace(directory, ranks), reference)]
    if tolerance is not None and values[1] is not None:
        assert values[0] == pytest.approx(values[1], rel=0, abs=tolerance), "the final weights are others"


def engine_goes_on(
    bench: Bench, directory: Path, reference: Any, launches: Sequence[tuple[int, Config]], *, tolerance: float
) -> None:
    """Law 7 under DeepSpeed: as the run would have trained on as many ranks as at first, and on as many as at last.

    Args:
        reference: makes an uninterrupted run, whose final line has the batch and the loss scale of its engine.
        launches: as for :func:`same_samples_on_any_topology`.
    """
    (before, config), (ranks, last) = launches[0], launches[-1]
    expected = reference({**config, "kill": None}, before)
    if ranks != before:
        same_samples_on_any_topology(bench, directory / "other", expected, [(ranks, last)], tolerance=tolerance)
    same_samples_on_any_topology(bench, directory / "run", expected, launches, tolerance=tolerance)
    final = read_trace(directory / "run", ranks).final[0]
    assert final is not None and expected.final[0] is not None
    assert final["engine"] == expected.final[0]["engine"]
    assert not list((directory / "run" / bench.run_directory / ".resume").glob("remove-*"))


def every_record_once_on_any_topology(
    bench: Bench, directory: Path, launches: Sequence[tuple[int, Config]], records: int
) -> None:
    """Law 7 for streams: whatever the numbers of ranks and workers, an epoch trains on each record once.

    Args:
        launches: for each launch the number of ranks and the whole configuration, of one epoch; all but the last are
            killed.
        records: how many different records the stream has.
    """
    trained: dict[int, list[str]] = {}
    for number, (ranks, config) in enumerate(launches):
        outcome = bench.run(directory, config, ranks=ranks)
        assert outcome.killed if number < len(launches) - 1 else outcome.require_success(), outcome.output
        for step, (rows, _, _) in _steps(read_trace(directory, ranks)).items():
            trained[step] = rows
        anchor = max(committed(directory / bench.run_directory).values())
        trained = {step: rows for step, rows in trained.items() if step < anchor}
    found = [row for rows in trained.values() for row in rows]
    assert len(found) == len(set(found)) == records


def goes_on_by_samples(
    bench: Bench, directory: Path, launches: Sequence[tuple[int, Config]], samples: int, reference: Trace
) -> None:
    """With another global batch a run trains on each sample of each epoch once, and its schedule ends where it ends.

    Args:
        launches: as for :func:`every_record_once_on_any_topology`.
        samples: of all epochs together, each with new augmentation.
    """
    every_record_once_on_any_topology(bench, directory, launches, samples)
    ends = [steps[max(steps)][1] for steps in (_steps(read_trace(directory, launches[-1][0])), _steps(reference))]
    assert ends[0] == ends[1], "the last step has another learning rate"
    finals = read_trace(directory, launches[-1][0]).final
    assert len({final["weights"] for final in finals if final}) == 1, "the ranks have other weights"


def _steps(trace: Trace) -> dict[int, tuple[list[str], set[str], float]]:
    """Return the rows of all ranks, the learning rates and the mean loss of each optimizer step."""
    lines: dict[int, list[dict[str, Any]]] = {}
    for of_rank in trace.steps:
        for line in of_rank:
            lines.setdefault(line["step"], []).append(line)
    return {
        step: (
            sorted(row for line in of_step for row in line["rows"]),
            {line["lr"] for line in of_step},
            sum(line["mean"] * len(line["rows"]) for line in of_step) / sum(len(line["rows"]) for line in of_step),
        )
        for step, of_step in lines.items()
    }


def export_is_the_model(directory: Path, run: str, names: Iterable[str], ranks: int) -> None:
    """The weights that ``export`` puts together are those that the run ended with.

    Args:
        directory: where the run has ended.
        run: the run directory there.
        names: the model's names in the order of its state dict.
        ranks: how many there were.
    """
    from safetensors.torch import load_file

    from training import digest

    command = [sys.executable, "-m", "resume_adapters.cli", "export", run, "-o", "whole.safetensors"]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    weights = load_file(directory / "whole.safetensors")
    final = read_trace(directory, ranks).final[0]
    assert final is not None and digest(*(weights[name] for name in names)) == final["weights"]


def finished_does_nothing_again(
    bench: Bench, directory: Path, reference: References, config: Config, same: Sequence[str], *, ranks: int = 1
) -> None:
    """A finished run that is launched again trains nothing, says so, and ends with the same results.

    Args:
        same: names of the final facts that must be the same.
    """
    shutil.copytree(reference.directory(config, ranks), directory, symlinks=True, dirs_exist_ok=True)
    first, before = reference(config, ranks), committed(directory / bench.run_directory)
    outcome = bench.run(directory, config, ranks=ranks).require_success()
    again = read_trace(directory, ranks)
    assert again.steps == ((),) * ranks
    assert "nothing to do" in outcome.output
    assert committed(directory / bench.run_directory) == before
    for found, expected in zip(again.final, first.final, strict=True):
        assert found is not None and expected is not None
        assert {name: found[name] for name in same} == {name: expected[name] for name in same}


def no_run_directory_below_a_file(bench: Bench, directory: Path, config: Config, *, ranks: int = 1) -> None:
    """A run directory that cannot be made is refused by name, before anything is trained."""
    file = directory / bench.run_directory
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("a file of the user's")
    outcome = bench.run(directory, config, ranks=ranks)
    assert 0 not in outcome.statuses and file.read_text() == "a file of the user's"
    assert re.search(r"RunDirectoryUnusable: .* is a file, or lies below one; expected a directory", outcome.output)
    assert not any(read_trace(directory, ranks).steps)


OF_A_RUN = (ResumableRun, Session, SaveEngine, Monitor, TrackedLoader)
"""Classes of which a run has one object, or one for each of its loaders."""


def opened_and_closed_leaves_nothing(bench: Bench, directory: Path, config: Config, *, cycles: int = 100) -> None:
    """Law 12: a run is opened and closed a hundred times in one process, however it ends, and leaves nothing behind.

    Args:
        config: a job that saves after each step.
        cycles: how often it trains at least, after a warm-up.
    """
    bench.start(directory, {**config, "cycles": cycles}).wait(LONG).require_success()
    lines = [json.loads(line) for line in (directory / "trace.0").read_text().splitlines()]
    trained = [line for line in lines if "cycle" in line]
    assert len(trained) >= cycles
    for line in trained:
        assert line["after"] == line["before"], f"the training left something behind: {line['cycle']}"
    before, after = (next(line for line in lines if line.get("measured") == name) for name in ("before", "after"))
    known, live = before.pop("objects"), after.pop("objects")
    held, left = Counter(before.pop("descriptors")), Counter(after.pop("descriptors"))
    # The batches that the last loader's workers are ahead, and the random states in those that came out of turn: as
    # many as there was time for, but not one of each cycle.
    ahead = [each.pop(name, 0) for each in (held, left) for name in list(each) if "/torch_" in name]
    assert sum(ahead) < 20
    assert left.total() <= held.total(), f"{left - held} instead of {held - left}; the collector may have closed some"
    assert {**after, "measured": "before"} == before
    assert not {name: (known.get(name, 0), count) for name, count in live.items() if count > known.get(name, 0)}
    assert not {kind.__name__: live.get(kind.__name__) for kind in OF_A_RUN if live.get(kind.__name__, 0) > 1}
    journals = list((directory / bench.run_directory).glob("*/.resume/journal.jsonl"))
    events = [json.loads(line)["event"] for file in journals for line in file.read_text().splitlines()]
    ends = [line["cycle"]["ends"] for line in trained] + [cycle.ends for cycle in ROUND] * WARM_UP
    # A loop that asks what it resumes from, before it says how far it goes, is refused after it was opened.
    counts = {len(ends), len(ends) - ends.count("refused")}
    assert events.count("start") in counts and events.count("resume") == events.count("start") - len(journals)


def older_framework_is_refused(adapter: ModuleType, framework: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter is not imported where its framework is older than pyproject.toml asks for."""
    name, project = framework.__name__.partition(".")[0], (Path(__file__).parents[1] / "pyproject.toml").read_text()
    oldest = re.search(rf'"{name}>=([\d.]+)', project)
    assert oldest is not None
    monkeypatch.setattr(framework, "__version__", "0.0.1")
    spec = importlib.util.spec_from_file_location(adapter.__name__, str(adapter.__file__))
    assert spec is not None and spec.loader is not None
    with pytest.raises(MissingFramework, match=f"found {name} 0.0.1, and needs {oldest[1]} or newer"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


Timeless = Callable[[str, bytes], bytes]
"""Takes out of a file's content, by its name, what two bare runs differ in too."""

OF_THE_PACKAGE = ("callback", "options")
"""What a job is told of the package alone."""


def unchanged(name: str, content: bytes) -> bytes:
    return content


def without_place(name: str, content: bytes) -> bytes:
    """Take out of an index of torch.distributed.checkpoint where it was written, and the number of the write."""
    if not name.endswith(".metadata"):
        return content
    index = pickle.loads(content)
    return repr((index.storage_data, index.state_dict_metadata)).encode()


def uninterrupted_equals_bare(
    bench: Bench, reference: References, config: Config, *, ranks: int = 1, timeless: Timeless = unchanged
) -> tuple[Path, Path]:
    """Law 0: an uninterrupted run has the losses, weights and native files of the same run without the package.

    Returns:
        The run directories, with the package and without.
    """
    bare = {**{name: value for name, value in config.items() if name not in OF_THE_PACKAGE}, "bare": True}
    require_same_steps(reference(config, ranks), reference(bare, ranks), start=0)
    require_same_end(reference(config, ranks), reference(bare, ranks))
    ours, theirs = (reference.directory(each, ranks) / bench.run_directory for each in (config, bare))
    native_files_are_the_same(ours, theirs, timeless)
    return ours, theirs


def native_files_are_the_same(with_package: Path, bare: Path, timeless: Timeless = unchanged) -> None:
    """Law 0: except for what the package adds, a run directory holds the same files, byte for byte.

    Args:
        timeless: takes out of a file's content what two bare runs differ in too: measured times.
    """
    of_all = without_checksums if STAGE == "memory" else bytes
    ours, theirs = (
        {name: of_all(timeless(name, content)) for name, content in _native_files(directory).items()}
        for directory in (with_package, bare)
    )
    assert ours.keys() == theirs.keys()
    different = [name for name in theirs if ours[name] != theirs[name]]
    assert not different, f"these files differ from the bare framework's: {different}"


def _native_files(run_directory: Path) -> dict[str, bytes]:
    added = ("resume", ".resume", "latest")
    found = {}
    for path in run_directory.rglob("*"):
        relative = path.relative_to(run_directory)
        if path.is_file() and not any(part in added or part.endswith(".resume") for part in relative.parts):
            found[relative.as_posix()] = path.read_bytes()
    return found


# ---- The step trace


def read_steps(file: Path) -> dict[int, dict[str, Any]]:
    """Return the step lines of a step trace, by step: of a step that was done twice, both are equal."""
    steps: dict[int, dict[str, Any]] = {}
    for line in map(json.loads, file.read_text().splitlines()):
        if line.pop("event") == "step":
            del line["time"], line["rank"]
            assert steps.setdefault(line["step"], line) == line, "a step was repeated otherwise"
    return steps


def watched(directory: Path, run_directory: str = "elsewhere") -> dict[str, str]:
    """Return the environment with which a job in a directory writes its step trace."""
    return {
        "RESUME_ADAPTERS_TRACE": str(directory / "steps.jsonl"),
        "RESUME_ADAPTERS_TRACE_EVERY": "4",
        "RESUME_ADAPTERS_RUN_DIR": str(directory / run_directory),
        "RESUME_ADAPTERS_SAVE_EVERY": "5",
    }


def traces_are_equal(
    bench: Bench,
    reference: References,
    directory: Path,
    config: Config,
    kill: Kill,
    *,
    quantities: Sequence[str] = ("batches", "rng", "loss", "lr"),
    ranks: int = 1,
) -> None:
    """A watched run trains as one that is not, and after a kill every line of its trace is the uninterrupted run's.

    Args:
        config: the job; its own run directory must stay as it is, and so must not be there.
        quantities: what every line has, with something in it.
    """
    bare, whole, resumed = reference(config, ranks), directory / "whole", directory / "resumed"
    bench.run(whole, config, ranks=ranks, env=watched(whole)).require_success()
    trace = read_trace(whole, ranks)
    require_same_steps(trace, bare, start=0)
    require_same_end(trace, bare)
    assert bench.run(resumed, {**config, "kill": kill}, ranks=ranks, env=watched(resumed)).killed
    bench.run(resumed, config, ranks=ranks, env=watched(resumed)).require_success()
    for rank in range(ranks):
        file = f"steps.jsonl{f'.rank-{rank:05d}' if rank else ''}"
        steps, again = read_steps(whole / file), read_steps(resumed / file)
        assert again == steps
        for line in steps.values():
            assert all(line.get(each) for each in quantities), line
        digests = [each for each, line in steps.items() if "weights" in line and "optimizer" in line]
        assert digests and all(each % 4 == 0 for each in digests)
    launches = [json.loads(line) for line in (resumed / "steps.jsonl").read_text().splitlines()]
    starts = [line for line in launches if line["event"] == "start"]
    assert [line["step"] for line in starts] == [0, kill["step"] // 5 * 5]
    assert [line["world_size"] for line in starts] == [ranks] * 2
    assert {Path(line["run_directory"]) for line in starts} == {resumed / "elsewhere"}
    kinds = {line["event"] for line in launches}
    assert {"data", "save", "committed", "end"} <= kinds
    assert not files_below(whole / bench.run_directory)


def files_below(directory: Path) -> list[Path]:
    """Return the files below a directory that may not be there."""
    return [each for each in directory.rglob("*") if each.is_file()]


# ---- Saves that are copied

STAGED = ("lets the framework write", "gives it its name", "writes the manifest", "commits")
"""Before which operations a job is killed whose saves are copied: the second of a launch is the first of those."""


def staged_equals_bare(
    bench: Bench, reference: References, config: Config, *, ranks: int = 1, timeless: Timeless = unchanged
) -> None:
    """Law 0 where saves are copied: same losses, same weights, same native files but for torch's checksums.

    Args:
        config: a job that saves at least four times, with ``stage="memory"``.
    """

    def content(name: str, content: bytes) -> bytes:
        return without_checksums(timeless(name, content))

    uninterrupted_equals_bare(bench, reference, config, ranks=ranks, timeless=content)
    directory = reference.directory(config, ranks)
    status = json.loads((directory / bench.run_directory / ".resume" / "status.json").read_bytes())
    assert status["staging"].startswith("memory: "), status


def without_checksums(content: bytes) -> bytes:
    """Return the records of the archives of ``torch.save`` in a file, without checksums and the archive's name."""
    found, at = [], 0
    while content[at:].startswith(b"PK\x03\x04"):  # torch.distributed.checkpoint writes one after another
        end = content.index(b"PK\x05\x06", at) + 22
        with zipfile.ZipFile(io.BytesIO(content[at:end])) as archive:
            for each in archive.infolist():
                name = each.filename.partition("/")[2]
                begin = at + each.header_offset
                begin += 30 + sum(struct.unpack_from("<HH", content, begin + 26))
                if name != ".data/serialization_id":  # made of the checksums
                    found += [name.encode(), content[begin : begin + each.file_size]]
        at = end
    return b"\0".join([*found, content[at:]])


def between_copy_and_commit(
    bench: Bench, directory: Path, config: Config, reference: Trace, event: str, *, ranks: int = 1
) -> None:
    """Law 3 where saves are copied: a kill before the commit leaves the checkpoint before, and no name of a half one.

    Nothing is written of the third save, behind which the job is killed.

    Args:
        config: a job with ``stage="memory"`` that saves after each second step, and goes on for 14 steps at least.
    """
    run_directory = directory / bench.run_directory
    held = {"hold_writes": {"event": event, "step": 5}}
    kill = {"event": event, "step": 7, "within_a_commit": True}
    outcome = bench.run(directory, {**config, **held, "kill": kill}, ranks=ranks)
    assert outcome.killed, outcome.output[-6000:]
    assert max(committed(run_directory).values()) == 4
    assert _steps_of_commits(run_directory) == [2, 4]
    assert not [*run_directory.glob("*/resume/pending"), *run_directory.glob("*.resume/pending")]

    bench.run(directory, config, ranks=ranks).require_success()
    trace = read_trace(directory, ranks)
    assert trace.first_step == 4
    require_same_steps(trace, reference, start=4)
    require_same_end(trace, reference)
    assert _steps_of_commits(run_directory)[:7] == [2, 4, 6, 8, 10, 12, 14]


def _steps_of_commits(run_directory: Path) -> list[int]:
    """Return the steps of which checkpoints were committed, in order, each once."""
    lines = (run_directory / ".resume" / "journal.jsonl").read_text().splitlines()
    return list(dict.fromkeys(each["step"] for line in lines if (each := json.loads(line))["event"] == "commit"))
