"""A training run in miniature, without a framework: what the core's tests save and resume.

Its whole state is a text. A framework would write files of its own (here ``model.bin``, past the storage); the core
writes the rest. Checkpoints are directories, or with :data:`FILES` single files.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from resume_adapters.core.checkpoint.checkpoint import Checkpoint
from resume_adapters.core.checkpoint.validity import ForeignStep
from resume_adapters.core.checkpoint.writer import Captured
from resume_adapters.core.ranks import SingleProcess
from resume_adapters.core.run.context import RunOptions
from resume_adapters.core.run.run import ResumableRun
from resume_adapters.core.saving.engine import THREAD_NAME
from resume_adapters.core.state.stateful import Stateful, StaticState
from resume_adapters.core.stop.policy import SIGNALS

FILES = False
"""Whether checkpoints are single files; tests run for both by their fixture ``shape``."""


@dataclass(frozen=True)
class Foreign:
    """Recognises what a function recognises; by default nothing of it is torn."""

    step: Callable[[Path], ForeignStep | None]
    require_whole: Callable[[Path], object] = bool


class Miniature:
    """One start of a run directory.

    Args:
        options: of :class:`ResumableRun`.
    """

    def __init__(self, directory: Path, **options: Any) -> None:
        self.run = new_run(directory, **options)
        self.choice = self.run.open()

    @property
    def step(self) -> int:
        """The step that it resumed from; 0 for a fresh start."""
        return self.choice.checkpoint.step if self.choice.checkpoint else 0

    @property
    def text(self) -> str:
        """The state that it resumed; empty for a fresh start."""
        return self.read(self.choice.checkpoint) if self.choice.checkpoint else ""

    def save(
        self,
        step: int,
        text: str = "",
        *,
        best: int | None = None,
        under: str = "",
        describe: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        """Save without waiting for the commit; ``describe`` stands in for the facts of an adapter."""
        text = text or f"state at {step}"
        path = self.run.directory / (under or name(step))
        content = MiniatureContent(self.run, text, step, describe, None if best is None else name(best))
        self.run.saver.save(path.name, step, content, is_file=FILES)

    def commit(self, step: int, text: str = "", *, best: int | None = None, under: str = "") -> None:
        """Save and wait for the commit."""
        self.save(step, text, best=best, under=under)
        self.run.saver.flush()

    def read(self, checkpoint: Checkpoint) -> str:
        """Return the text that a checkpoint holds; the same in all its files."""
        reader = self.run.reader(checkpoint)
        saved = reader.rank_tree(self.run.ranks.rank)
        assert saved is not None
        own: str = saved["text"]
        assert native(checkpoint.path).read_bytes() == own.encode() * 20
        part = reader.part("ema")
        assert part["step"] == checkpoint.step
        assert torch.equal(part["shadow"], as_tensor(own))
        return own

    def committed(self) -> dict[str, int]:
        """Return the steps of the committed checkpoints, by name."""
        return committed(self.run.directory)


def new_run(directory: Path, **given: Any) -> ResumableRun:
    """Return a run that is not yet opened, of one process by default, with what is given of it and of its options."""
    made = {name: given.pop(name) for name in ("ranks", "storage", "clock") if name in given}
    return ResumableRun(directory, RunOptions(**given), **{"ranks": SingleProcess(), **made})


class GivenContent:
    """What a checkpoint is to hold, as a test gives it: ``write`` gets the path of the checkpoint."""

    def __init__(self, write: Callable[[Path], object], parts: Mapping[str, Stateful] | None = None, /, **facts: Any):
        self.write, self.given, self.facts = write, dict(parts or {}), {"epoch": 0.0, "reason": "scheduled", **facts}

    def save(self, directory: Path) -> None:
        self.write(directory)

    def capture(self) -> Captured:
        return Captured({}, self.given, self.facts)

    def owner_of(self, file: Path) -> int:
        return 0


class MiniatureContent:
    """What a checkpoint of a miniature is to hold; ``facts`` stands in for what an adapter describes."""

    def __init__(
        self, run: ResumableRun, text: str, step: int, facts: Callable[[], dict[str, Any]] | None, best: str | None
    ) -> None:
        self.run, self.text, self.step, self.facts, self.best = run, text, step, facts, best

    def save(self, directory: Path) -> None:
        if self.run.storage_group.is_leader:
            self.run.storage.write(native(directory), self.text.encode() * 20)

    def capture(self) -> Captured:
        facts = {"epoch": self.step / 10, "reason": "scheduled"} if self.facts is None else self.facts()
        return Captured(
            {"text": self.text},
            {"ema": StaticState({"shadow": as_tensor(self.text), "step": self.step})},
            {"best": self.best, **facts},
        )

    def owner_of(self, file: Path) -> int:
        return 0


def name(step: int) -> str:
    return f"checkpoint-{step}{'.ckpt' if FILES else ''}"


def native(checkpoint: Path) -> Path:
    """Return the file that the framework wrote."""
    return checkpoint if ".ckpt" in checkpoint.name else checkpoint / "model.bin"


def own(checkpoint: Path) -> Path:
    """Return the directory of what the package added."""
    return checkpoint.with_name(f"{checkpoint.name}.resume") if ".ckpt" in checkpoint.name else checkpoint / "resume"


def copy(source: Path, target: Path) -> None:
    """Copy a checkpoint."""
    if ".ckpt" in source.name:
        shutil.copy(source, target)
        shutil.copytree(own(source), own(target))
    else:
        shutil.copytree(source, target)


def as_tensor(text: str) -> torch.Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def committed(directory: Path) -> dict[str, int]:
    """Return the steps of the committed checkpoints of a run directory, by name."""
    return {
        path.name: json.loads(marker.read_bytes())["manifest"]["step"]
        for path, marker in markers(directory).items()
        if not path.is_symlink()
    }


def markers(directory: Path) -> dict[Path, Path]:
    """Return the commit markers of a run directory, by checkpoint."""
    inside = {file.parents[1]: file for file in directory.glob("*/resume/manifest.json")}
    beside = {file.parent.with_suffix(""): file for file in directory.glob("?*.resume/manifest.json")}
    return dict(sorted({**inside, **beside}.items()))


def set_aside(directory: Path) -> list[str]:
    """Return the names of the checkpoints that were set aside."""
    found = (directory / ".resume" / "set-aside").glob("*")
    return sorted({path.name.removesuffix(".resume") for path in found})


def effects() -> dict[str, Any]:
    """Return what runs may leave behind: threads, file descriptors, children, process groups, signal handlers."""
    gc.collect()
    until = time.monotonic() + 0.5
    for thread in threading.enumerate():
        # Of a run that an earlier test left open: it ends once that is collected.
        if thread.name.startswith(THREAD_NAME):
            thread.join(max(0.0, until - time.monotonic()))
    threads, descriptors = _fewest()
    return {**_effects(), "system_threads": threads, "descriptors": descriptors}


def open_files() -> dict[str, int]:
    """Return how many file descriptors are open on what; other threads may open some for a moment."""
    return _fewest(seconds=0.01)[1]


def left_open(before: dict[str, int]) -> dict[str, int]:
    """Return which file descriptors are open now and were not before."""
    return dict(Counter(_descriptors()) - Counter(before))


def left_behind(before: dict[str, Any], seconds: float = 60.0) -> dict[str, Any]:
    """Return what there is now and was not before, once it has had time to go: empty where nothing was left behind."""
    gc.collect()
    until = time.monotonic() + seconds
    while (more := _more(before, _effects())) and time.monotonic() < until:
        time.sleep(0.02)
    return more


def _more(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    changed = {"handlers": after["handlers"]} if after["handlers"] != before["handlers"] else {}
    numbers = {name: after[name] for name in ("system_threads", "children", "groups") if after[name] > before[name]}
    kinds = {name: dict(Counter(after[name]) - Counter(before[name])) for name in ("threads", "descriptors")}
    return {**changed, **numbers, **{name: found for name, found in kinds.items() if found}}


def _effects() -> dict[str, Any]:
    import torch.distributed as dist

    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "system_threads": len(os.listdir("/proc/self/task")),
        "descriptors": _descriptors(),
        "children": len(psutil.Process().children()),
        "groups": len(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else 0,
        "handlers": {number.name: str(signal.getsignal(number)) for number in SIGNALS},
    }


def _fewest(seconds: float = 0.05) -> tuple[int, dict[str, int]]:
    """Return how few threads of the system and file descriptors there were in five looks, some seconds apart.

    A thread that was joined is still there for a moment, and so are sockets that a thread of gloo closes.
    """
    threads, descriptors = [], []
    for _ in range(5):
        threads.append(len(os.listdir("/proc/self/task")))
        descriptors.append(_descriptors())
        time.sleep(seconds)
    return min(threads), min(descriptors, key=lambda kinds: sum(kinds.values()))


def _descriptors() -> dict[str, int]:
    """Return how many file descriptors are open on what, without the numbers in its name."""
    names = []
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it was the one of the listing, or was closed meanwhile
            names.append(re.sub(r"\d+", "#", os.readlink(f"/proc/self/fd/{each}")))
    return dict(sorted(Counter(names).items()))


def leftovers(directory: Path) -> list[str]:
    """Return what a crash may leave and the next start must remove."""
    patterns = ("*.superseded*", "*/resume/pending", "*.resume/pending", ".resume/begin-*", ".resume/remove-*")
    return [path.relative_to(directory).as_posix() for pattern in patterns for path in directory.glob(pattern)]
