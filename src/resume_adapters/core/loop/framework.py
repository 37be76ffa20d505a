"""What an adapter provides for a hand-written loop: its framework's side of it."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from resume_adapters.core.choices import Stage
from resume_adapters.core.loop.guard import Trained
from resume_adapters.core.loop.loader import LoopLoader
from resume_adapters.core.saving.staging import StagingOptions
from resume_adapters.core.session.context import RestoreContext
from resume_adapters.core.session.framework import Framework
from resume_adapters.core.session.session import Session
from resume_adapters.core.state.records import Record
from resume_adapters.core.state.stateful import Stateful


@dataclass(frozen=True)
class Resumed:
    """How much of a run is done when it resumes.

    Attributes:
        epoch: epochs completed.
        step: optimizer steps completed.
        batches: batches of the running epoch that are done.
    """

    epoch: int = 0
    step: int = 0
    batches: int = 0


class LoopFramework(Framework):
    """A :class:`~resume_adapters.core.session.framework.Framework` whose training loop is written by hand.

    Attributes:
        rank_state_type: the record that :meth:`rank_state` returns.
    """

    rank_state_type: type[Record] = Record

    # ---- Steps and data

    @abc.abstractmethod
    def trained(self) -> Trained:
        """Return what is trained, as far as the framework saves it."""

    def require_complete(self) -> None:
        """Refuse to begin where what is trained was given to the framework too late to be saved.

        Raises:
            UnsupportedSetting: it was.
        """
        return

    @abc.abstractmethod
    def track(self, loader: Any, session: Session) -> LoopLoader:
        """Return the loader that the loop iterates over, with the torch loader beneath it tracked by the session."""

    def is_accumulating(self) -> bool:
        """Return whether gradients are held that no optimizer step has used: no checkpoint is taken then."""
        return False

    @abc.abstractmethod
    def has_stepped(self) -> bool:
        """Return whether an optimizer step ended since the last call; one that a scaler skipped counts."""

    def skip_micro_batches(self, batches: int) -> None:
        """Bring the next optimizer step forward by that many batches, where the framework counts them."""

    def grad_norm(self) -> Any:
        """Return the gradient norm of the step that has ended; ``None`` where the framework does not have it."""
        return None

    def passes_begun(self, loader: Any) -> int | None:
        """Return the passes that a loader has begun, where what the framework puts around it counts them by itself."""
        return None

    def restore_passes(self, loader: Any, begun: int) -> None:
        """Set the number of passes that a loader has begun, as :meth:`passes_begun` returned it."""
        return

    def skip_pass(self, loader: Any, *, is_left: bool = False, is_iterated: bool = False) -> None:
        """Leave a loader as it is after a pass of which every batch was used before the checkpoint.

        Args:
            loader: the loader, as the script has it.
            is_left: the script leaves the pass before the loader's end.
            is_iterated: the script iterates over the loader itself, and is given an empty pass.
        """
        return

    # ---- Saving

    def rehearse(self, context: RestoreContext) -> None:
        """Prove nothing: what this package loads by itself is what it has saved."""

    def is_read(self, place: str) -> bool:
        """Return that a resume reads all of those files."""
        return True

    @abc.abstractmethod
    def checkpoint_name(self, step: int) -> str:
        """Return the name of the directory for a checkpoint of this step."""

    def begin_save(self) -> None:
        """Find out what :meth:`parts` must know of all ranks. Every rank calls it before each save."""
        return

    def staging(self, stage: Stage) -> StagingOptions:
        """Return how saves are copied, as far as the framework knows."""
        return StagingOptions(stage)

    def rank_state(self) -> Record:
        """Return what the framework does not save and belongs to this rank alone."""
        return Record()

    def parts(self) -> dict[str, Stateful]:
        """Return what the framework does not save and is alike on all ranks."""
        return {}

    def sharded_state(self) -> Mapping[str, Any]:
        """Return what is sharded over the ranks, such as shards of weights, by the name of the component."""
        return {}

    def modules(self) -> Iterable[Any]:
        """Return the modules that are trained, also as they are wrapped to reduce gradients in buckets."""
        return self.trained().modules

    # ---- Loading

    @abc.abstractmethod
    def load(self, context: RestoreContext) -> None:
        """Load and verify the framework's own files. Every rank calls it."""

    def load_rank_state(self, record: Any) -> None:
        """Restore what :meth:`rank_state` returned, before the first step."""

    def load_foreign(self, context: RestoreContext) -> Resumed:
        """Restore what else a checkpoint of the bare framework says, and return how much of the run is done."""
        raise AssertionError("no checkpoint of the bare framework is recognised")
