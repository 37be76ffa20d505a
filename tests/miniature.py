"""A training run in miniature, without a framework: what the core's tests save and resume.

Its whole state is a text. A framework would write files of its own (here ``model.bin``, past the storage); the core
writes the rest. Checkpoints are directories, or with :data:`FILES` single files.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from resume_adapters.core.checkpoint.checkpoint import Checkpoint
from resume_adapters.core.ranks import SingleProcess
from resume_adapters.core.run.run import ResumableRun
from resume_adapters.core.state.stateful import StaticState

FILES = False
"""Whether checkpoints are single files; tests run for both by their fixture ``shape``."""


class Miniature:
    """One start of a run directory.

    Args:
        directory: the run directory.
        options: of :class:`ResumableRun`.
    """

    def __init__(self, directory: Path, **options: Any) -> None:
        self.run = ResumableRun(directory, **{"ranks": SingleProcess(), **options})
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
        self.run.save(
            path.name,
            step,
            native=lambda: self._write_native(path, text),
            own=lambda: {"text": text},
            parts={"ema": StaticState({"shadow": as_tensor(text), "step": step})},
            owner=lambda file: 0,
            facts=describe or (lambda: {"epoch": step / 10, "reason": "scheduled"}),
            best=None if best is None else name(best),
            is_file=FILES,
        )

    def _write_native(self, path: Path, text: str) -> None:
        if self.run.sharing.leads:
            native(path).write_bytes(text.encode() * 20)

    def commit(self, step: int, text: str = "", *, best: int | None = None, under: str = "") -> None:
        """Save and wait for the commit."""
        self.save(step, text, best=best, under=under)
        self.run.flush()

    def read(self, checkpoint: Checkpoint) -> str:
        """Return the text that a checkpoint holds; the same in all its files."""
        own: str = self.run.saved(checkpoint).own()["text"]
        assert native(checkpoint.path).read_bytes() == own.encode() * 20
        part = self.run.saved(checkpoint).part("ema")
        assert part["step"] == checkpoint.step
        assert torch.equal(part["shadow"], as_tensor(own))
        return own

    def committed(self) -> dict[str, int]:
        """Return the steps of the committed checkpoints, by name."""
        return committed(self.run.directory)


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


def leftovers(directory: Path) -> list[str]:
    """Return what a crash may leave and the next start must remove."""
    return [
        path.relative_to(directory).as_posix()
        for pattern in ("*.superseded*", "*/resume/pending", "*.resume/pending", ".resume/begin-*", ".resume/remove-*")
        for path in directory.glob(pattern)
    ]
