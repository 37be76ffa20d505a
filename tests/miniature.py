"""A training run in miniature, without a framework: what the core's tests save and resume.

Its whole state is a text. A framework would write files of its own (here ``model.bin``, past the storage); the core
writes the rest.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from resume_adapters.core.ranks import Alone
from resume_adapters.core.resolve import Checkpoint
from resume_adapters.core.run import ResumableRun
from resume_adapters.core.state import Value


class Miniature:
    """One start of a run directory.

    Args:
        directory: the run directory.
        options: of :class:`ResumableRun`.
    """

    def __init__(self, directory: Path, **options: Any) -> None:
        self.run = ResumableRun(directory, **{"ranks": Alone(), **options})
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
        describe: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        """Save without waiting for the commit; ``describe`` stands in for the facts of an adapter."""
        text = text or f"state at {step}"
        path = self.run.directory / name(step)
        self.run.save(
            name(step),
            step,
            native=lambda: self._write_native(path, text),
            own=lambda: {"text": text},
            parts={"ema": Value({"shadow": as_tensor(text), "step": step})},
            owner=lambda file: 0,
            facts=describe or (lambda: {"epoch": step / 10, "reason": "scheduled"}),
            best=None if best is None else name(best),
        )

    def _write_native(self, path: Path, text: str) -> None:
        if self.run.ranks.rank == 0:
            (path / "model.bin").write_bytes(text.encode() * 20)

    def commit(self, step: int, text: str = "", *, best: int | None = None) -> None:
        """Save and wait for the commit."""
        self.save(step, text, best=best)
        self.run.flush()

    def read(self, checkpoint: Checkpoint) -> str:
        """Return the text that a checkpoint holds; the same in all its files."""
        own: str = self.run.read_own(checkpoint)["text"]
        assert (checkpoint.path / "model.bin").read_bytes() == own.encode() * 20
        part = self.run.read_part(checkpoint, "ema")
        assert part["step"] == checkpoint.step
        assert torch.equal(part["shadow"], as_tensor(own))
        return own

    def committed(self) -> dict[str, int]:
        """Return the steps of the committed checkpoints, by name."""
        return committed(self.run.directory)


def name(step: int) -> str:
    return f"checkpoint-{step}"


def as_tensor(text: str) -> torch.Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def committed(directory: Path) -> dict[str, int]:
    """Return the steps of the committed checkpoints of a run directory, by name."""
    markers = sorted(directory.glob("*/resume/manifest.json"))
    return {
        file.parents[1].name: json.loads(file.read_bytes())["manifest"]["step"]
        for file in markers
        if not file.parents[1].is_symlink()
    }


def set_aside(directory: Path) -> list[str]:
    """Return the names of what was set aside."""
    return sorted(path.name for path in (directory / ".resume" / "set-aside").glob("*"))


def leftovers(directory: Path) -> list[str]:
    """Return what a crash may leave and the next start must remove."""
    return [
        path.relative_to(directory).as_posix()
        for pattern in ("*.superseded", "*/resume/pending", ".resume/begin-*", ".resume/remove-*")
        for path in directory.glob(pattern)
    ]
