"""Let jobs of all adapters meet random faults for some minutes, and judge what is left of each run.

``nox -s soak -- --minutes 10``; ``nox -s soak -- --rounds 1 --seed 17`` does one round again. A round is a
run of one adapter on one or two ranks. A few launches of it are killed, stopped and then killed, killed on one rank,
frozen while another one starts, or started twice at once. The last launch is left alone. Its weights must be those of a
run that nobody disturbed, and the run directory must be as clean and as small.

A seed determines which faults a round has and when, counted in seconds. What a job does at that second depends on the
machine, so a failure may take a few tries to come again; its directory is kept.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import contract
from launch import Running, Server

TESTS = Path(__file__).parents[1] / "tests"

LONGEST = 6.0
"""Seconds after which a fault comes at the latest. By then a job is half through."""

BOUND = 3.0
"""How many times as large a run directory may be as that of a run that nobody disturbed."""


@dataclass(frozen=True)
class Adapter:
    """How an adapter's job is started, and what it does.

    Attributes:
        name: its folder of tests.
        imports: what its jobs import.
        config: a job that saves often and keeps one checkpoint.
        run_directory: where it saves.
        ranks: the numbers of ranks that it is started on.
    """

    name: str
    imports: tuple[str, ...]
    config: dict[str, Any]
    run_directory: str = "out"
    ranks: tuple[int, ...] = (1, 2)


ADAPTERS = (
    Adapter(
        "hf",
        ("transformers.trainer", "transformers.models.gpt2.modeling_gpt2", "transformers_tables", "datasets"),
        {"args": {"max_steps": 30, "save_steps": 2, "save_total_limit": 1}, "samples": 60, "slow": 0.05},
    ),
    Adapter(
        "lightning",
        ("lightning.pytorch",),
        {
            "samples": 60,
            "trainer": {"max_steps": 30, "max_epochs": -1},
            "checkpoints": [{"every_n_train_steps": 2, "save_top_k": 1, "save_last": True}],
            "slow": 0.05,
        },
    ),
    Adapter(
        "accelerate",
        ("accelerate",),
        {"max_steps": 30, "epochs": 10, "save_every": 2, "limit": 1, "slow": 0.05},
        "project/checkpoints",
    ),
    Adapter(
        "deepspeed",
        ("deepspeed", "deepspeed_operators"),
        {"stage": 2, "max_steps": 30, "epochs": 10, "save_every": 2, "keep": "KeepLast(1)", "slow": 0.05},
    ),
)


class Round:
    """One run that meets faults.

    Args:
        bench: how to start the job.
        adapter: what it is a job of.
        ranks: the number of its ranks.
        directory: where.
        choices: what happens to it.
    """

    def __init__(
        self, bench: contract.Bench, adapter: Adapter, ranks: int, directory: Path, choices: random.Random
    ) -> None:
        self._bench = bench
        self._adapter = adapter
        self._ranks = ranks
        self._directory = directory
        self._choices = choices
        self.faults: list[str] = []

    def _start(self) -> Running:
        return self._bench.start(self._directory, self._adapter.config, ranks=self._ranks)

    def _sleep(self, longest: float = LONGEST) -> None:
        time.sleep(self._choices.uniform(0.0, longest))

    def disturb(self) -> None:
        """Launch the job a few times, each time with a fault."""
        kinds: list[Callable[[], None]] = [self.kill, self.stop_and_kill, self.freeze, self.twins]
        if self._ranks > 1:
            kinds.append(self.kill_one_rank)
        for _ in range(self._choices.randint(2, 4)):
            fault = self._choices.choice(kinds)
            self.faults.append(fault.__name__)
            fault()

    def kill(self) -> None:
        running = self._start()
        self._sleep()
        _end(running)

    def stop_and_kill(self) -> None:
        running = self._start()
        self._sleep()
        running.signal(signal.SIGTERM)
        self._sleep(0.5)
        _end(running)

    def kill_one_rank(self) -> None:
        running = self._start()
        self._sleep()
        running.signal(signal.SIGKILL, self._choices.randrange(self._ranks))
        self._sleep(1.0)
        _end(running)

    def freeze(self) -> None:
        first = self._start()
        self._sleep()
        first.signal(signal.SIGSTOP)
        second = self._start()
        self._sleep()
        first.signal(signal.SIGCONT)
        self._sleep(2.0)
        _end(first)
        _end(second)

    def twins(self) -> None:
        twins = [self._start(), self._start()]
        self._sleep()
        for each in self._choices.sample(twins, 2):
            _end(each)

    def finish(self) -> contract.Trace:
        """Launch the job once more, and leave it alone."""
        self._start().wait().require_success()
        return contract.read_trace(self._directory, self._ranks)


def _end(running: Running) -> None:
    running.signal(signal.SIGKILL)
    running.wait()


def judge(found: contract.Trace, run_directory: Path, expected: contract.Trace, size: int) -> None:
    """Compare what is left of a run with one that nobody disturbed."""
    for rank, (final, wanted) in enumerate(zip(found.final, expected.final, strict=True)):
        assert final and wanted, f"rank {rank} did not reach its end"
        assert final["weights"] == wanted["weights"], f"rank {rank} has other weights"
    control = run_directory / ".resume"
    patterns = ("*.superseded*", "*/resume/pending", "*.resume/pending", ".latest.*.tmp")
    left = [path for pattern in patterns for path in run_directory.glob(pattern)]
    left += [path for pattern in ("begin-*", "remove-*", ".*.tmp") for path in control.glob(pattern)]
    assert not left, f"the run directory is not clean: {left}"
    assert not list(control.glob("set-aside/*")), "a checkpoint was damaged"
    assert size_of(run_directory) <= BOUND * size, f"it has {size_of(run_directory)} bytes, the undisturbed one {size}"


def size_of(run_directory: Path) -> int:
    """Return the bytes of the files of a run directory, without its journal."""
    files = [file for file in run_directory.rglob("*") if file.is_file() and not file.is_symlink()]
    return sum(file.stat().st_size for file in files if file.name != "journal.jsonl")


class Soak:
    """All rounds, with the reference run of each kind of job, which is done once.

    Args:
        directory: where.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._benches: dict[str, contract.Bench] = {}
        self._references: dict[tuple[str, int], tuple[contract.Trace, int]] = {}

    def _bench(self, adapter: Adapter) -> contract.Bench:
        if adapter.name not in self._benches:
            server = Server("torch", "numpy", *adapter.imports)
            self._benches[adapter.name] = contract.Bench(server, TESTS / adapter.name / "job.py", adapter.run_directory)
        return self._benches[adapter.name]

    def _reference(self, adapter: Adapter, ranks: int) -> tuple[contract.Trace, int]:
        if (adapter.name, ranks) not in self._references:
            place = self._directory / f"reference-{adapter.name}-{ranks}"
            trace = contract.uninterrupted(self._bench(adapter), place, {**adapter.config, "slow": 0.0}, ranks=ranks)
            self._references[adapter.name, ranks] = trace, size_of(place / adapter.run_directory)
        return self._references[adapter.name, ranks]

    def round(self, seed: int, only: str | None) -> str | None:
        """Do one round; return what is wrong, or ``None``."""
        choices = random.Random(seed)
        adapter = choices.choice([each for each in ADAPTERS if only in (None, each.name)])
        ranks = choices.choice(adapter.ranks)
        expected, size = self._reference(adapter, ranks)
        place = self._directory / f"round-{seed}"
        each = Round(self._bench(adapter), adapter, ranks, place, choices)
        failure = None
        try:
            each.disturb()
            judge(each.finish(), place / adapter.run_directory, expected, size)
        except AssertionError as wrong:
            failure = f"{wrong}"
        said = "bit for bit" if failure is None else f"FAILED, see {place}:\n{failure}"
        print(f"seed {seed}: {adapter.name} on {ranks}, {', '.join(each.faults)}: {said}", flush=True)
        if failure is None:
            shutil.rmtree(place)
        return failure

    def close(self) -> None:
        """End the processes from which jobs are forked."""
        for bench in self._benches.values():
            bench.server.close()


def main() -> None:
    """Do rounds until the time is up; exit with 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="begin no round after that")
    parser.add_argument("--rounds", type=int, help="do no more rounds than that")
    parser.add_argument("--seed", type=int, help="of the first round; the next ones count on from it")
    parser.add_argument("--adapter", choices=[each.name for each in ADAPTERS], help="only this one")
    asked = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if asked.seed is None else asked.seed
    directory = Path(tempfile.mkdtemp(prefix="soak-"))
    soak, until, failed, done = Soak(directory), time.monotonic() + asked.minutes * 60, [], 0
    try:
        while time.monotonic() < until and (asked.rounds is None or done < asked.rounds):
            if soak.round(seed + done, asked.adapter) is not None:
                failed.append(seed + done)
            done += 1
    finally:
        soak.close()
    again = f"; again: --rounds 1 --seed {failed[0]}" if failed else ""
    print(f"{done} rounds, {len(failed)} failed: {failed}{again}")
    if not failed:
        shutil.rmtree(directory)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
