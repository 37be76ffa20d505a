"""What the demo's two runs did, and whether they differ."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from resume_adapters.cli.demo.kills import Launch, Point


@dataclass(frozen=True)
class Run:
    """One training run, in one launch or several.

    Attributes:
        launches: what each process did.
        resumed_from: for each launch, the step that it resumed from; 0 for a fresh start.
        digest: SHA-256 of the final weights.
    """

    launches: tuple[Launch, ...]
    resumed_from: tuple[int, ...]
    digest: str

    @property
    def points(self) -> list[Point]:
        """Every step of every launch, including those that were done twice."""
        return [point for launch in self.launches for point in launch.points]


@dataclass(frozen=True)
class Result:
    """The result of the demo; ``difference`` is the first one between the runs, ``None`` if they are identical."""

    directory: Path
    seed: int
    reference: Run
    interrupted: Run
    difference: str | None
    plot: Path
    seconds: float
