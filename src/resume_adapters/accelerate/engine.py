"""A model and an optimizer in a DeepSpeed engine, which Accelerate drives. DeepSpeed is imported where it trains."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from accelerate.utils.deepspeed import DeepSpeedSchedulerWrapper  # there without DeepSpeed too

from resume_adapters.accelerate import files
from resume_adapters.accelerate.prepared import Prepared
from resume_adapters.core.session.context import RestoreContext
from resume_adapters.core.state.records import Record
from resume_adapters.core.state.stateful import Stateful
from resume_adapters.integrations.deepspeed_engine import names
from resume_adapters.integrations.deepspeed_engine.rank_state import EngineRankState


class EngineStrategy:
    """A DeepSpeed engine has the model and the optimizer; Accelerate's plugin for it allows one.

    Args:
        accelerator: an ``accelerate.Accelerator``, after ``prepare``.
        run_directory: where checkpoints go.

    Raises:
        UnsupportedSetting: a setting of DeepSpeed rules an exact resume out.
    """

    rank_state_type: type[Record] = EngineRankState

    def __init__(self, accelerator: Any, run_directory: Path) -> None:
        from resume_adapters.integrations.deepspeed_engine.engine import attach_engine

        self._prepared = Prepared(accelerator)
        (engine,) = self._prepared.models
        self._engine = attach_engine(engine, run_directory)
        self.models = self._prepared.models
        self.optimizers = self._prepared.optimizers
        # A schedule that the engine has is saved by the engine.
        self.schedulers = [each for each in self._prepared.schedulers if not _is_of_engine(each)]
        self.invariants = {**self._prepared.invariants, **self._engine.invariants}

    def has_stepped(self) -> bool:
        """Return whether the engine counted a step; one that overflowed counts."""
        return self._engine.has_stepped()

    def tensors(self) -> dict[str, Any]:
        """Return the model's tensors, without content."""
        return self._engine.state_dict()

    def arguments(self) -> dict[str, Any]:
        """Return what DeepSpeed's configuration says."""
        return self._engine.arguments()

    def parts(self) -> dict[str, Stateful]:
        """Return what DeepSpeed does not save."""
        return self._engine.parts()

    def sharded_state(self) -> dict[str, Any]:
        """Return nothing: what DeepSpeed shards, it loads and this package verifies file by file."""
        return {}

    def rank_state(self) -> EngineRankState:
        """Return what DeepSpeed does not save and belongs to this rank alone."""
        return self._engine.rank_state()

    def load_rank_state(self, state: EngineRankState) -> None:
        """Restore what :meth:`rank_state` returned."""
        self._engine.load_rank_state(state)

    def modules(self) -> list[Any]:
        """Return nothing: DeepSpeed has buckets of its own, in a fixed order."""
        return []

    def compare(self) -> None:
        """No-op: no process has the whole state."""

    def has_lost_buckets(self) -> bool:
        """Return False: DeepSpeed has buckets of its own, in a fixed order."""
        return False

    def writing(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which DeepSpeed writes data only."""
        return self._engine.saving()

    def owner_of(self, file: Path) -> int:
        """Return the rank that wrote a file."""
        return names.owner(file) or files.owner(file)

    def load(self, context: RestoreContext) -> None:
        """Load by DeepSpeed, and then the schedulers that it does not know."""
        self._engine.load(context, context.path, "pytorch_model")
        self._prepared.call_load_hooks([], context.path)
        self._prepared.load_schedulers(context, self.schedulers)

    def close(self) -> None:
        """Undo what was wrapped in the engine."""
        self._engine.close()


def _is_of_engine(scheduler: Any) -> bool:
    return isinstance(scheduler, DeepSpeedSchedulerWrapper)
