"""A checkpoint's content without a framework, for the benchmarks that call the core alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from resume_adapters.core.checkpoint.writer import Captured
from resume_adapters.core.state.stateful import StaticState


@dataclass(frozen=True)
class SmallContent:
    """A rank state, one part, and what ``write`` puts into the directory of the checkpoint.

    Attributes:
        step: optimizer steps completed.
        write: writes the framework's files.
    """

    step: int
    write: Callable[[Path], object] = lambda directory: None

    def save(self, directory: Path) -> None:
        self.write(directory)

    def capture(self) -> Captured:
        return Captured(
            {"consumed": self.step},
            {"ema": StaticState({"updates": self.step})},
            {"epoch": self.step / 10, "reason": "scheduled"},
        )

    def owner_of(self, file: Path) -> int:
        return 0
