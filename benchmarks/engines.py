"""What the hooks add to a step and to a save of a DeepSpeed engine; both kinds take turns in one process."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch

from benchmarks import figure
from benchmarks.figure import Figure
from benchmarks.saves import GOAL_BLOCKED, GOAL_RATIO
from benchmarks.steps import GOAL_MICROSECONDS
from benchmarks.turns import ROUND, serve, taking_turns

_WIDTH, _LAYERS = 1024, 30
"""Of the model that is saved: 31 million parameters, 16 bytes each with ZeRO 1: 500 MB."""


def measure(repeats: int) -> list[Figure]:
    """Measure in processes of their own, each a rank of one for DeepSpeed."""
    with tempfile.TemporaryDirectory() as directory:
        job = ["-m", "benchmarks.engines", directory, "--steps"]
        bare, hooked = taking_turns([job, [*job, "--with-hooks"]], repeats)
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "benchmarks.engines", directory, "--saves", str(max(1, repeats // 200))]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    blocked, safe, hooked_blocked, hooked_safe = json.loads(done.stdout.splitlines()[-1])
    return [
        figure.of(
            "DeepSpeed: processor time added per step",
            [(more - less) * 1e6 for less, more in zip(bare, hooked, strict=True)],
            "us",
            GOAL_MICROSECONDS,
            detail=f"{len(bare)} pairs of {ROUND} steps; a bare one takes {figure.median(bare) * 1e6:.0f} us",
        ),
        figure.of(
            "DeepSpeed, 500 MB save: training blocked, against a bare save",
            [seconds / figure.median(blocked) for seconds in hooked_blocked],
            "x",
            GOAL_BLOCKED,
            detail=f"a bare save takes {figure.median(blocked):.2f} s",
        ),
        figure.of(
            "DeepSpeed, 500 MB save: until committed, against a bare save with fsync",
            [seconds / figure.median(safe) for seconds in hooked_safe],
            "x",
            GOAL_RATIO,
            detail=f"a bare save with fsync takes {figure.median(safe):.2f} s",
        ),
    ]


def _engine(width: int, layers: int, stage: int) -> Any:
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}, "steps_per_print": None}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def _loader(count: int, width: int) -> Any:
    rows: Any = torch.randn(count, width)
    return torch.utils.data.DataLoader(rows, batch_size=4)


def _steps(directory: Path | None) -> Generator[float, None, None]:
    """Yield the processor time of each step, with hooks if a run directory is given."""
    from resume_adapters.deepspeed import ResumeHooks

    engine = _engine(16, 1, stage=1)
    loader = _loader(100_000, 16)
    run = None if directory is None else ResumeHooks(engine, directory, save_every=10**9)
    batches = iter(loader) if run is None else run.batches(loader)
    with contextlib.nullcontext() if run is None else run:
        while True:
            began = time.thread_time()
            loss = engine(next(batches)).square().mean()
            engine.backward(loss)
            engine.step()
            if run is not None:
                run.step(loss=loss)
            yield time.thread_time() - began


def _saves(directory: Path, rounds: int) -> list[list[float]]:
    """Return how long saves take: bare, bare with fsync, and with hooks until training goes on, and until committed."""
    from resume_adapters import KeepLast
    from resume_adapters.deepspeed import ResumeHooks
    from resume_adapters.integrations.deepspeed_engine import names

    engine = _engine(_WIDTH, _LAYERS, stage=1)
    run = ResumeHooks(engine, directory / "hooked", save_every=1, keep=KeepLast(1), stage="memory")
    batches = run.batches(_loader(1000, _WIDTH))
    batch = next(batches)
    bare: list[tuple[float, float]] = []
    hooked: list[tuple[float, float]] = []
    for number in range(rounds + 1):
        engine.backward(engine(batch).square().mean())
        engine.step()
        run.step()
        if number % 2:  # the second save finds the disk and the memory as the first left them
            bare.append(_save_bare(engine, directory / "bare", number))
        began = time.perf_counter()
        batch = next(batches)  # the body of the step before ends here, with a save
        blocked = time.perf_counter() - began
        while not (directory / "hooked" / names.tag(number + 1) / "resume" / "manifest.json").exists():
            time.sleep(0.001)
        hooked.append((blocked, time.perf_counter() - began))
        _wait_for_prune(directory / "hooked", names.tag(number))
        if not number % 2:
            bare.append(_save_bare(engine, directory / "bare", number))
    run.finish()
    # The first of each makes its buffers.
    return [*map(list, zip(*bare[1:], strict=True)), *map(list, zip(*hooked[1:], strict=True))]


def _save_bare(engine: Any, directory: Path, number: int) -> tuple[float, float]:
    """Return how long a save takes without fsync and with it; earlier saves are removed first."""
    from resume_adapters.integrations.deepspeed_engine import names

    began = time.perf_counter()
    engine.save_checkpoint(str(directory))
    bare = time.perf_counter() - began
    for file in (directory / names.tag(number + 1)).iterdir():
        _sync(file)
    synced = time.perf_counter() - began
    shutil.rmtree(directory / names.tag(number), ignore_errors=True)
    return bare, synced


def _wait_for_prune(run_directory: Path, former: str) -> None:
    """Wait until the disk is free for the next save."""
    while (run_directory / former).exists() or any((run_directory / ".resume").glob("remove-*")):
        time.sleep(0.001)


def _sync(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", action="store_true")
    parser.add_argument("--with-hooks", action="store_true")
    parser.add_argument("--saves", type=int)
    given = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(probe.getsockname()[1])
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    if given.steps:
        serve(_steps(given.directory if given.with_hooks else None))
    else:
        print("\n" + json.dumps(_saves(given.directory, given.saves)))


if __name__ == "__main__":
    _main()
