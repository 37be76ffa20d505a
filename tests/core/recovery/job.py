"""What the ranks of the recovery tests do: a block of plain torch that fails at given places. Forked by the server.

A fault raises, hangs, freezes the process, or kills it: ``["forward", 1, 3, "kill"]``.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from resume_adapters.core.recovery.attempt import running_attempt
from resume_adapters.core.recovery.groups import REST_THREAD
from resume_adapters.recovery import Attempt, restartable
from waiting import LIMIT, until

from plain_torch import Launch
from recovering import use_memory_of_node

RANK = int(os.environ["RANK"])

SAVE_EVERY = 5


def wait_for_the_test() -> None:
    Path("waits").touch()
    while not Path("go on").exists():
        time.sleep(0.01)


def wait_for_commit(step: int) -> None:
    """Wait until the last save that is due before a step is committed: on a busy machine a kill may come before."""
    due = (step - 1) // SAVE_EVERY * SAVE_EVERY
    if due > 0:
        until(lambda: any(Path().glob(f"*/checkpoint-{due}/resume/manifest.json")))


FREEZES: dict[str, Callable[[], object]] = {
    **{name: lambda: os.kill(os.getpid(), signal.SIGSTOP) for name in ("stop", "stop in a save", "stop in the update")},
    "lock": lambda: ctypes.PyDLL(None).sleep(600),  # which keeps Python's lock
    "all_reduce": lambda: dist.all_reduce(torch.ones(1)),  # the other rank does not take part
    "worker": lambda: time.sleep(600),
    "wait": wait_for_the_test,
}
"""What a rank does once, in all its processes, instead of raising."""


class Faults:
    """Faults, each of them once: a place, a rank and a step."""

    def __init__(self, listed: list[list[Any]]) -> None:
        self._left = [tuple(each) for each in listed]
        self._samples = 0

    def raise_at(self, place: str, step: int) -> None:
        if (place, RANK, step, "kill") in self._left and self._is_first(f"{place}.{step}"):
            wait_for_commit(step)
            os.kill(os.getpid(), signal.SIGKILL)
        if self.take(place, step):
            if place == "slow":
                work()
                return
            if place == "hang":
                Path("hangs").touch()
                time.sleep(600)
            if place == "once it hangs":
                until(Path("hangs").exists)
            if place in FREEZES and self._is_first(f"{place}.{step}"):
                FREEZES[place]()
            if place in FREEZES:
                return
            raise RuntimeError(f"{place} at {step}")

    def take(self, place: str, step: int) -> bool:
        """Return whether a fault is due, and forget it."""
        fault = (place, RANK, step)
        is_due = fault in self._left
        if is_due:
            self._left.remove(fault)
        return is_due

    def raise_in_worker(self) -> None:
        """In a worker the step is that of its start: it hangs at its twentieth sample."""
        self._samples += 1
        for fault in self._left:
            if fault[:2] == ("worker", RANK) and self._samples == 20 and self._is_first("worker"):
                FREEZES["worker"]()

    def _is_first(self, fault: str) -> bool:
        """Return whether no process before this one has died of a fault."""
        with contextlib.suppress(FileExistsError):
            Path(f"killed.{RANK}.{fault}").touch(exist_ok=False)
            return True
        return False


def work() -> None:
    """Compute until the ranks have found that this one is slow, and wait for it again."""
    running = running_attempt()
    assert running is not None
    pulse, ends, found = running.pulse, time.monotonic() + LIMIT, 0
    waited_since = pulse._last
    while pulse._last == waited_since and time.monotonic() < ends:
        found += sum(range(found % 100))


class Data(torch.utils.data.Dataset[int]):
    def __init__(self, faults: Faults, launch: list[Launch]) -> None:
        self.faults, self.launch = faults, launch

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> int:
        step = self.launch[0].loop.global_step if self.launch else 0
        self.faults.raise_at("data", step)
        if torch.utils.data.get_worker_info() is not None:
            self.faults.raise_in_worker()
        return index


def train(
    attempt: Attempt, directory: Path, faults: Faults, attempts: list[Any], epochs: int, workers: int
) -> dict[str, Any]:
    """Train on all ranks; return what must be as if nothing had failed."""
    attempts.append([attempt.number, attempt.level and attempt.level.value])
    with Path(f"starts.{RANK}").open("a") as file:
        file.write(json.dumps(attempts[-1][1]) + "\n")
    with Path(f"times.{RANK}").open("a") as file:
        file.write(f"{attempt.number} {time.monotonic()}\n")
    dist.init_process_group("gloo")
    dist.new_group([0])  # of which rank 1 is no member
    launches: list[Launch] = []
    options = {"save_every": SAVE_EVERY, "seed": 7 + RANK, "epochs": epochs, "workers": {"num_workers": workers}}
    launch = Launch(directory, dataset=Data(faults, launches), **options)
    launches.append(launch)
    framework = launch.framework
    step = framework.train

    def watched(batch: torch.Tensor) -> torch.Tensor:
        for place in ("wait", "forward", "once it hangs", "hang", "slow", "stop", "lock", "all_reduce"):
            faults.raise_at(place, launch.loop.global_step)
        found = step(batch)
        faults.raise_at("after", launch.loop.global_step)
        return found

    native = framework.save

    def save(place: Path) -> None:
        for each in ("save", "stop in a save"):
            faults.raise_at(each, launch.loop.global_step)
        native(place)

    framework.save = save  # type: ignore[method-assign]

    def before_step(*_: Any) -> None:
        for place in ("before", "stop in the update"):
            faults.raise_at(place, launch.loop.global_step)

    before = framework.optimizer.register_step_pre_hook(before_step)
    framework.train = watched  # type: ignore[method-assign]
    native_end = launch.run.steps.end_step

    def end_step(step: int, *given: Any) -> Any:
        if faults.take("cut at its end", step):
            until(lambda: running_attempt().is_left)
            dist.all_reduce(torch.ones(1), group=launch.run.ranks.group)
        return native_end(step, *given)

    launch.run.steps.end_step = end_step  # type: ignore[method-assign]
    launch.die = lambda launch: faults.raise_at("end", launch.loop.global_step)
    launch()
    faults.raise_at("at the end", launch.loop.global_step)
    before.remove()
    timeout = dist.distributed_c10d._get_default_store().timeout.total_seconds()
    return {"end": launch.end, "trace": launch.trace, "store timeout": timeout}


def effects() -> dict[str, int]:
    """Return what the block has left in this process, once the groups of its attempts have had their rest."""
    ends = time.monotonic() + LIMIT
    while time.monotonic() < ends and any(each.name == REST_THREAD for each in threading.enumerate()):
        time.sleep(0.1)
    gc.collect()
    process = psutil.Process()
    return {
        "threads": threading.active_count(),
        "descriptors": min(_descriptors(process) for _ in range(5)),
        "megabytes": process.memory_info().rss >> 20,
        "children": len(process.children()),
        "modules": sum(isinstance(each, torch.nn.Linear) for each in gc.get_objects()),
        "threads of gloo": sum("gloo" in name_of(each.id) for each in process.threads()),
    }


def _descriptors(process: psutil.Process) -> int:
    """Return how many there are after a moment: a thread of gloo may be closing some."""
    time.sleep(0.1)
    return process.num_fds()


def name_of(thread: int) -> str:
    """Return the name of a thread; empty where it has ended meanwhile."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/self/task/{thread}/comm").read_text()
    return ""


def run(
    name: str,
    faults: list[list[Any]],
    epochs: int = 3,
    workers: int = 0,
    measured: bool = False,
    **options: Any,
) -> dict[str, Any]:
    attempts: list[Any] = []
    block = restartable(**options)(train)
    result: dict[str, Any] = {}
    try:
        result = block(Path(name), Faults(faults), attempts, epochs, workers)
    except Exception as error:  # of any kind: the test looks at it
        if type(error).__name__ == os.environ.get("RAISES"):
            raise
        if "LINGERS" in os.environ:
            time.sleep(600)
        result = {"error": type(error).__name__, "message": str(error), "has group": dist.is_initialized()}
    if dist.is_initialized():
        dist.destroy_process_group()
    left = {"effects": effects()} if measured else {}
    return {**result, "attempts": attempts, **left}


def main() -> None:
    use_memory_of_node()
    cases: dict[str, Any] = json.loads(sys.argv[1])
    found = {name: run(name, faults, **options) for name, (faults, options) in cases.items()}
    Path(f"result.{RANK}").write_text(json.dumps(found))


main()
