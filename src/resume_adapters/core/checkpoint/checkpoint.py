"""What is known of a checkpoint: chosen, rejected, or listed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from resume_adapters.core.checkpoint.manifest import Manifest


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that can be resumed from; ``manifest`` is ``None`` for a foreign one."""

    path: Path
    step: int
    manifest: Manifest | None


@dataclass(frozen=True)
class RejectedCheckpoint:
    """A checkpoint that was passed over, and why."""

    path: Path
    reason: str


@dataclass(frozen=True)
class ResumeChoice:
    """What to resume from (``None``: start fresh), and what newer candidates were passed over."""

    checkpoint: Checkpoint | None
    rejected: tuple[RejectedCheckpoint, ...]


@dataclass(frozen=True)
class CheckpointInfo:
    """One row of a run directory's listing. ``state`` is committed, pending, damaged or foreign."""

    path: Path
    state: str
    step: int | None
    manifest: Manifest | None
    reason: str = ""
