"""A save that is copied and written in the background, against ``torch.save``: without a framework, in one process.

``python -m benchmarks.staged WIDTH LAYERS SAVES KIND`` is one job; its last line is a JSON record.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from benchmarks import figure
from benchmarks.figure import Figure

_STEPS = 4
"""Steps after a save that are measured with it."""

_WARM_UP = 2
"""Saves of a launch of which one is written at once, and one is the first to be copied."""

GOAL_COPY, GOAL_TRAINING, GOAL_SAFE, GOAL_MEGABYTES = 1.25, 0.3, 1.15, 32

_BARE, _PACKAGE, _THREAD, _PROCESS, _SNAPSHOT = "bare", "memory", "dcp-thread", "dcp-process", "torchsnapshot"
_PEERS = {
    _THREAD: "dcp.async_save, a thread",
    _PROCESS: "dcp.async_save, a process",
    **({_SNAPSHOT: "torchsnapshot's async_take"} if importlib.util.find_spec("torchsnapshot") else {}),
}
"""What torch has for the same purpose, with its defaults, and torchsnapshot where it is installed.

They write formats of their own; torchsnapshot forces nothing onto the disk.
"""


def measure(rounds: int) -> list[Figure]:
    """Return what a save of 0.5 GB costs the training, until when it is safe, and the memory that it takes."""
    records: dict[str, dict[str, list[float]]] = {kind: {} for kind in (_BARE, _PACKAGE, *_PEERS)}
    for _ in range(rounds):
        for kind, record in records.items():
            for name, values in run(930, 48, 8, kind).items():
                record.setdefault(name, []).extend(values)
    bare, ours = records[_BARE], records[_PACKAGE]
    size = 930 * 930 * 4 * 48 * 3 / 1e6
    rows = (
        ("the call", "call", None, "torch.save"),
        ("processor time of the call", "processor", None, "torch.save"),
        (f"the call, and what it adds to the next {_STEPS} steps", "training", GOAL_TRAINING, "torch.save"),
        ("until committed", "safe", GOAL_SAFE, "torch.save with fsync"),
    )
    found = [
        figure.of(
            f"500 MB save with stage=memory: {what}, against {against}",
            [seconds / figure.median(bare[name]) for seconds in ours[name]],
            "x",
            goal,
            detail=f"{against} takes {figure.median(bare[name]):.3f} s; load {os.getloadavg()[0]:.0f}",
        )
        for what, name, goal, against in rows
    ]
    added = figure.median(ours["peak"]) - figure.median(bare["peak"]) - size
    many = run(64, 1000, 5, _PACKAGE, descriptors=1024)
    copies = figure.median(ours["copy"])
    return [
        figure.of(
            "500 MB save with stage=memory: processor time of the call, against a plain copy of the same 144 tensors",
            [seconds / copies for seconds in ours["processor"]],
            "x",
            GOAL_COPY,
            detail=f"into a block that is there: {copies:.3f} s",
        ),
        *found,
        *(
            figure.of(
                f"500 MB save with {peer}: {what}, against {against}",
                [seconds / figure.median(bare[name]) for seconds in records[kind][name]],
                "x",
            )
            for kind, peer in _PEERS.items()
            for what, name, _, against in rows
        ),
        figure.of("500 MB save with stage=memory: peak memory, beyond one copy", [added], "MB", GOAL_MEGABYTES),
        figure.of("3,000 tensors, ulimit -n 1024: the call", [1e3 * each for each in many["call"]], "ms"),
    ]


def run(width: int, layers: int, saves: int, kind: str, descriptors: int | None = None) -> dict[str, list[float]]:
    """Run a job in a new process and return its record."""
    command = [sys.executable, "-m", "benchmarks.staged", *map(str, (width, layers, saves, kind))]
    limit = [] if descriptors is None else ["bash", "-c", f'ulimit -n {descriptors} && exec "$@"', "bash"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*limit, *command], capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    record: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return record


class Content:
    """What a checkpoint is to hold: one file of ``torch.save``."""

    def __init__(self, state: Callable[[], Mapping[str, Any]]) -> None:
        self._state = state

    def save(self, directory: Path) -> None:
        import torch

        torch.save(self._state(), directory / "state.pt")

    def capture(self) -> Any:
        from resume_adapters.core.checkpoint.writer import Captured

        return Captured({}, {}, {"epoch": 0.0, "reason": "scheduled"})

    def owner_of(self, file: Path) -> int:
        return 0


class _Saver(Protocol):
    def save(self, number: int) -> None:
        """Return when the training may go on."""

    def finish(self) -> None:
        """Wait until what was saved is on the disk."""

    def close(self) -> None:
        """End what was begun for it."""


class _Bare:
    def __init__(self, directory: Path, content: Content) -> None:
        self._directory, self._content = directory, content

    def save(self, number: int) -> None:
        self._content.save(self._directory)

    def finish(self) -> None:
        with open(self._directory / "state.pt", "rb") as file:
            os.fsync(file.fileno())

    def close(self) -> None:
        pass


class _Package:
    def __init__(self, directory: Path, content: Content) -> None:
        from resume_adapters import KeepLast
        from resume_adapters.core.run.context import RunOptions
        from resume_adapters.core.run.run import ResumableRun
        from resume_adapters.core.saving.staging import StagingOptions

        self._content, self._saved = content, 0
        self._run = ResumableRun(directory, RunOptions(keep=KeepLast(1), staging=StagingOptions("memory")))
        self._run.open()

    def save(self, number: int) -> None:
        self._run.saver.save(f"checkpoint-{number}", number, self._content)
        self._saved = number

    def finish(self) -> None:
        self._run.saver.flush()

    def close(self) -> None:
        assert self._run.saver.engine.last_committed == self._saved
        self._run.close()


class _Distributed:
    def __init__(self, directory: Path, state: Callable[[], dict[str, Any]], kind: str) -> None:
        import torch.distributed

        alone: Any = torch.distributed.HashStore()  # type: ignore[attr-defined]
        torch.distributed.init_process_group("gloo", store=alone, rank=0, world_size=1)
        self._directory, self._state, self._kind = directory, state, kind
        self._written: Any = None

    def save(self, number: int) -> None:
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

        types = {_THREAD: AsyncCheckpointerType.THREAD, _PROCESS: AsyncCheckpointerType.PROCESS}
        place = self._directory / "checkpoint"
        self._written = async_save(self._state(), checkpoint_id=place, async_checkpointer_type=types[self._kind])

    def finish(self) -> None:
        self._written.result()

    def close(self) -> None:
        pass


class _Snapshots:
    def __init__(self, directory: Path, model: Any, optimizer: Any) -> None:
        self._directory, self._state = directory, {"model": model, "optimizer": optimizer}
        self._written: Any = None

    def save(self, number: int) -> None:
        from torchsnapshot import Snapshot

        self._written = Snapshot.async_take(str(self._directory / "snapshot"), self._state)

    def finish(self) -> None:
        self._written.wait()

    def close(self) -> None:
        pass


def _job(width: int, layers: int, saves: int, kind: str, directory: Path) -> dict[str, list[float]]:
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    rows = torch.randn(8, width)

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    makes: dict[str, Callable[[], _Saver]] = {
        _BARE: lambda: _Bare(directory, Content(state)),
        _PACKAGE: lambda: _Package(directory, Content(state)),
        _SNAPSHOT: lambda: _Snapshots(directory, model, optimizer),
    }
    saver = makes.get(kind, lambda: _Distributed(directory, state, kind))()

    def step() -> float:
        began = time.perf_counter()
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()
        return time.perf_counter() - began

    record: dict[str, list[float]] = {"call": [], "processor": [], "training": [], "safe": []}
    for number in itertools.count(1):
        if number > _WARM_UP + 2 * saves:
            break
        os.sync()
        usual = statistics.median(step() for _ in range(_STEPS))
        began, processor = time.perf_counter(), time.thread_time()
        saver.save(number)
        call, processor = time.perf_counter() - began, time.thread_time() - processor
        waits = number % 2  # either for the commit, or for the next steps
        steps = 0.0 if waits else sum(step() for _ in range(_STEPS))
        saver.finish()
        if number > _WARM_UP and waits:
            record["safe"].append(time.perf_counter() - began)
        elif number > _WARM_UP:
            for name, value in (("call", call), ("processor", processor), ("training", call + steps - _STEPS * usual)):
                record[name].append(value)
    saver.close()
    record["peak"] = [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 * 1.048576]
    record["copy"] = _plain_copies(state(), saves)
    return record


def _plain_copies(state: Mapping[str, Any], count: int) -> list[float]:
    """Return the processor time of copies of all tensors of a state into a block that is there already."""
    import torch

    moments = [each for values in state["optimizer"]["state"].values() for each in values.values()]
    tensors = [each.view(-1).view(torch.uint8) for each in (*state["model"].values(), *moments)]
    block = torch.ones(sum(each.numel() for each in tensors), dtype=torch.uint8)
    found = []
    for _ in range(count):
        began, at = time.thread_time(), 0
        for each in tensors:
            block[at : at + each.numel()].copy_(each)
            at += each.numel()
        found.append(time.thread_time() - began)
    return found


def main() -> None:
    """Run the job that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("width", "layers", "saves"):
        parser.add_argument(name, type=int)
    parser.add_argument("kind", choices=(_BARE, _PACKAGE, _THREAD, _PROCESS, _SNAPSHOT))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(sys.stderr):
        record = _job(given.width, given.layers, given.saves, given.kind, Path(directory))
    print(json.dumps(record))


if __name__ == "__main__":
    main()
