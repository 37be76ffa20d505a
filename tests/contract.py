"""The laws of exact resume, written once. Each adapter runs them with jobs of its own framework.

An adapter's tests provide a :class:`Bench`: how to start its job in a directory. The laws compare what the job traced
on every rank and for every micro-step (loss, batch digest, learning rate, all exact) and what it found at its end
(weights, log, EMA, random numbers) with an uninterrupted run of the same script.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch import Outcome, Running, Server

Config = dict[str, Any]
Kill = dict[str, Any]


@dataclass(frozen=True)
class Trace:
    """What a job traced: each rank's micro-steps in the order in which they ran, and what it found at its end."""

    steps: tuple[tuple[dict[str, Any], ...], ...]
    final: tuple[dict[str, Any] | None, ...]

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
    """

    server: Server
    script: Path
    run_directory: str = "out"
    launches: int = field(default=0, init=False)

    def start(self, directory: Path, config: Config, *, ranks: int = 1, env: dict[str, str] | None = None) -> Running:
        """Start the job in ``directory``, with an empty trace."""
        directory.mkdir(parents=True, exist_ok=True)
        for old in directory.glob("trace.*"):
            old.unlink()
        file = directory / "config.json"
        file.write_text(json.dumps(config))
        self.launches += 1
        return self.server.start(self.script, [file.name], directory, ranks, env or {})

    def run(self, directory: Path, config: Config, *, ranks: int = 1, env: dict[str, str] | None = None) -> Outcome:
        """Run the job to its end, whatever that is."""
        return self.start(directory, config, ranks=ranks, env=env).wait()


def read_trace(directory: Path, ranks: int = 1) -> Trace:
    """Read what the last launch in ``directory`` traced."""
    steps, finals = [], []
    for rank in range(ranks):
        file = directory / f"trace.{rank}"
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        steps.append(tuple(line for line in lines if "loss" in line))
        finals.append(next((line for line in lines if line.get("final")), None))
    return Trace(tuple(steps), tuple(finals))


def uninterrupted(bench: Bench, directory: Path, config: Config, *, ranks: int = 1) -> Trace:
    """Run the job once, without a kill: the reference."""
    bench.run(directory, config, ranks=ranks).require_success()
    trace = read_trace(directory, ranks)
    assert all(trace.final), "the reference did not reach its end"
    return trace


def committed(run_directory: Path) -> dict[str, int]:
    """Return the committed checkpoints of a run directory, by name, with their steps."""
    found = [marker.parent.parent for marker in run_directory.glob("*/resume/manifest.json")]
    return {
        path.name: int(json.loads((path / "resume" / "manifest.json").read_bytes())["manifest"]["step"])
        for path in found
        if not path.is_symlink()
    }


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
        bench: how to start the job.
        directory: where.
        config: the job.
        reference: an uninterrupted run of it.
        kills: what kills each launch, in order.
        ranks: number of ranks.
        relaunch: for each launch (the first included) what differs in its configuration.
        ignore: names of final facts that this comparison leaves out.
    """
    variants = [*relaunch, *[{} for _ in range(len(kills) + 1 - len(relaunch))]]
    for number, kill in enumerate([*kills, None]):
        anchor = max(committed(directory / bench.run_directory).values(), default=0)
        outcome = bench.run(directory, {**config, **variants[number], "kill": kill}, ranks=ranks)
        trace = read_trace(directory, ranks)
        if kill is None:
            outcome.require_success()
        else:
            assert outcome.killed, f"launch {number} was not killed: {outcome.statuses}\n{outcome.output[-6000:]}"
        require_same_steps(trace, reference, start=anchor)
    require_same_end(trace, reference, ignore)


def require_same_steps(trace: Trace, reference: Trace, start: int) -> None:
    """Every micro-step from step ``start`` on has the loss, the batch and the learning rate of the reference."""
    for rank, (lines, expected) in enumerate(zip(trace.steps, reference.steps, strict=True)):
        following = [line for line in expected if line["step"] >= start]
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


def native_files_are_the_same(
    with_package: Path, bare: Path, timeless: Callable[[str, bytes], bytes] = lambda name, content: content
) -> None:
    """Law 0: beside what the package adds, a run directory holds the same files, byte for byte.

    Args:
        with_package: the run directory of a run with the package.
        bare: that of a run without.
        timeless: takes out of a file's content what two bare runs differ in too: measured times.
    """
    ours, theirs = (
        {name: timeless(name, content) for name, content in _native_files(directory).items()}
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
        if path.is_file() and not set(relative.parts) & set(added):
            found[relative.as_posix()] = path.read_bytes()
    return found
