"""Checkpoints as they were read: chosen, rejected, or listed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from resume_adapters.core.checkpoint.layout import CheckpointState
from resume_adapters.core.checkpoint.manifest import Manifest


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that can be resumed from; ``manifest`` is ``None`` for a foreign one."""

    path: Path
    step: int
    manifest: Manifest | None


@dataclass(frozen=True)
class RejectedCheckpoint:
    """A checkpoint that cannot be resumed from, and why."""

    path: Path
    reason: str


@dataclass(frozen=True)
class ResumeChoice:
    """The checkpoint to resume from (``None``: start fresh), and the newer ones that were rejected.

    Attributes:
        passed_over: the names of those of a later step that were not committed.
    """

    checkpoint: Checkpoint | None
    rejected: tuple[RejectedCheckpoint, ...]
    passed_over: tuple[str, ...] = ()


@dataclass(frozen=True)
class CheckpointInfo:
    """One row of the listing of a run directory.

    Attributes:
        path: the checkpoint.
        state: what it is.
        step: optimizer steps completed; ``None`` where that is not known.
        manifest: its manifest, if it has a valid one.
        reason: why it is in this state.
        is_ranked: the step is known from the content, not from the name alone.
    """

    path: Path
    state: CheckpointState
    step: int | None
    manifest: Manifest | None
    reason: str = ""
    is_ranked: bool = True
