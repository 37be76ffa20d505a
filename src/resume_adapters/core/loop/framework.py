"""What an adapter provides for a hand-written loop: its framework's side of it."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resume_adapters.core.checkpoint.checkpoint import Checkpoint
from resume_adapters.core.checkpoint.manifest import PartEntry
from resume_adapters.core.loop.loader import LoopLoader
from resume_adapters.core.session.framework import Trackers
from resume_adapters.core.session.session import Session
from resume_adapters.core.state.stateful import Stateful

Tree = dict[str, Any]


@dataclass(frozen=True)
class Resumed:
    """What of a run is done when it goes on.

    Attributes:
        epoch: epochs completed.
        step: optimizer steps completed.
        batches: batches of the running epoch that are done.
    """

    epoch: int = 0
    step: int = 0
    batches: int = 0


class LoopFramework(abc.ABC):
    """What an adapter provides: its framework's side of a hand-written loop."""

    registers: str = ""
    """What registers a further part of the state, as a user writes it."""

    accumulation: int = 1
    """Batches of the loop in an optimizer step."""

    carries_windows: bool = False
    """Whether an accumulation goes on from one pass over the data into the next."""

    trackers: Trackers
    """The framework's experiment trackers."""

    fixed: Mapping[str, int] = {}
    """What must be as it was when the checkpoint was saved, in a user's words."""

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the tensors of the models that are trained, for the architecture digest."""

    @abc.abstractmethod
    def feed(self, outer: Any, session: Session) -> LoopLoader:
        """Return what the loop iterates over, with the torch loader beneath it watched by the session."""

    @abc.abstractmethod
    def in_window(self) -> bool:
        """Return whether gradients are held that no optimizer step has used: no checkpoint is taken then."""

    @abc.abstractmethod
    def begin_within_window(self, batches: int) -> None:
        """Let the next optimizer step come that many batches sooner."""

    @abc.abstractmethod
    def has_stepped(self) -> bool:
        """Return whether an optimizer step ended since this was last asked; one that a scaler skipped counts."""

    @abc.abstractmethod
    def checkpoint_name(self, step: int) -> str:
        """Return the name of the directory for a checkpoint of this step."""

    @abc.abstractmethod
    def save(self, directory: Path) -> None:
        """Let the framework write its own files into a pending checkpoint. Every rank calls it."""

    @abc.abstractmethod
    def load(self, session: Session) -> None:
        """Load and prove the framework's own files of ``session.checkpoint``. Every rank calls it."""

    @abc.abstractmethod
    def owner(self, file: Path) -> int:
        """Return the rank that wrote a file of the framework, by its path in the checkpoint."""

    @abc.abstractmethod
    def state(self) -> Tree:
        """Return what the framework does not save and belongs to this rank alone."""

    @abc.abstractmethod
    def restore(self, state: Tree) -> None:
        """Put back what :meth:`state` returned, before the first step."""

    @abc.abstractmethod
    def adopt(self, checkpoint: Checkpoint) -> Resumed:
        """Restore what the loaded checkpoint of the bare framework says beside, and return how far it is."""

    def skip_pass(self, outer: Any) -> None:
        """Leave a loader as it is after its pass, of which every batch was used before the checkpoint."""
        return

    def modules(self) -> Iterable[Any]:
        """Return the modules that may reduce gradients in buckets."""
        return ()

    def parts(self) -> dict[str, Stateful]:
        """Return what the framework does not save and is alike on all ranks."""
        return {}

    def spread(self) -> Mapping[str, Any]:
        """Return what is spread over the ranks, such as shards of weights, by the name of the component."""
        return {}

    @abc.abstractmethod
    def entries(self) -> Sequence[PartEntry]:
        """Say of each part of the framework who captures it."""
