"""A checkpoint's content without a framework, for the benchmarks that call the core alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resume_adapters.core.state.stateful import Stateful, StaticState


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

    def rank_state(self) -> dict[str, Any]:
        return {"consumed": self.step}

    def completed(self) -> Mapping[str, Any]:
        return {}

    def parts(self) -> dict[str, Stateful]:
        return {"ema": StaticState({"updates": self.step})}

    def describe(self, rank_state: Mapping[str, Any]) -> dict[str, Any]:
        return {"epoch": self.step / 10, "reason": "scheduled"}

    def owner_of(self, file: Path) -> int:
        return 0
