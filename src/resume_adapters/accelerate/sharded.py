"""Models and optimizers that are sharded over the processes: FSDP2."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from accelerate.utils import load_fsdp_model

from resume_adapters.accelerate import compat, files
from resume_adapters.accelerate.prepared import Prepared, StepCounter, component_name
from resume_adapters.core.checkpoint import distributed_metadata
from resume_adapters.core.session.context import RestoreContext
from resume_adapters.core.state.records import Record
from resume_adapters.core.state.stateful import ModuleBuffers, Stateful


class ShardedStrategy:
    """Every process has a shard of each tensor. Accelerate and torch read its files, on any number of ranks.

    Args:
        accelerator: an ``accelerate.Accelerator``, after ``prepare``.
    """

    rank_state_type: type[Record] = Record

    def __init__(self, accelerator: Any) -> None:
        self._prepared = Prepared(accelerator)
        self._accelerator = accelerator
        self._steps = StepCounter(self._prepared)
        self.models = self._prepared.models
        self.optimizers = self._prepared.optimizers
        self.schedulers = self._prepared.schedulers
        self.invariants = self._prepared.invariants

    def has_stepped(self) -> bool:
        """Return whether the batch ended an optimizer step; one that the scaler skipped counts."""
        return self._steps.has_stepped()

    def tensors(self) -> dict[str, Any]:
        """Return the tensors of all models, by the model's number and their names without wrappers."""
        return self._prepared.tensors()

    def arguments(self) -> dict[str, Any]:
        """Return nothing: all is given to the accelerator."""
        return {}

    def parts(self) -> dict[str, Stateful]:
        """Return the buffers; each process has its own."""
        return {"buffers": ModuleBuffers(dict(enumerate(self.models)))}

    def sharded_state(self) -> dict[str, Any]:
        """Return the models' parameters and the optimizers' state, by the name of each model and optimizer."""
        models = {
            component_name("model", index): dict(each.named_parameters()) for index, each in enumerate(self.models)
        }
        optimizers = {
            component_name("optimizer", index): each.state_dict() for index, each in enumerate(self.optimizers)
        }
        return {**models, **optimizers}

    def rank_state(self) -> Record:
        """Return nothing: Accelerate saves all that there is."""
        return Record()

    def load_rank_state(self, state: Record) -> None:
        """No-op."""

    def modules(self) -> list[Any]:
        """Return nothing: FSDP2 has no buckets."""
        return []

    def compare(self) -> None:
        """No-op: no process has the whole state."""

    def has_lost_buckets(self) -> bool:
        """Return False: FSDP2 has no buckets."""
        return False

    def writing(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which ``save_state`` writes."""
        return contextlib.nullcontext()

    def owner_of(self, file: Path) -> int:
        """Return the rank that wrote a file."""
        return files.owner(file)

    def load(self, context: RestoreContext) -> None:
        """Load models and optimizers by Accelerate, verify them, and load the schedulers."""
        path, plugin = context.path, self._accelerator.state.fsdp_plugin
        with distributed_metadata.reading(context.files):
            for index, model in enumerate(self.models):
                load_fsdp_model(plugin, self._accelerator, model, str(path), index)
            for index, (optimizer, model) in enumerate(zip(self.optimizers, self.models, strict=False)):
                compat.load_optimizer(self._accelerator, optimizer, model, path, index)
        self._steps.reset()  # torch makes the state that it fills by a step that changes nothing
        self._prepared.call_load_hooks([], path)
        context.verify_shards(self.sharded_state)
        self._prepared.load_schedulers(context, self.schedulers)

    def close(self) -> None:
        """Remove what was hooked into optimizers."""
        self._steps.close()
