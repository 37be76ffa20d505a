"""Models and optimizers of which every process has the whole: one process, or DDP."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object

from resume_adapters.accelerate import files
from resume_adapters.accelerate.prepared import Prepared, StepCounter, ddp_around
from resume_adapters.core.checkpoint.native_files import read_weight_files
from resume_adapters.core.session.context import RestoreContext
from resume_adapters.core.state.fingerprint import value_digest
from resume_adapters.core.state.records import Record
from resume_adapters.core.state.stateful import ModuleBuffers, Stateful
from resume_adapters.errors import UnsupportedSetting

_SAMPLE = 1 << 16
"""Bytes that are compared of a larger tensor: where processes train apart, every element differs."""


class ReplicatedStrategy:
    """Every process has the whole model.

    Args:
        accelerator: an ``accelerate.Accelerator``, after ``prepare``.
    """

    rank_state_type: type[Record] = Record

    def __init__(self, accelerator: Any) -> None:
        self._prepared = Prepared(accelerator)
        self._accelerator = accelerator
        self._steps = StepCounter(self._prepared)
        self._modules: list[Any] | None = None
        self._is_compared = False
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
        """Return the buffers, where each process has its own."""
        if any(not each.broadcast_buffers for each in self.modules()):
            return {"buffers": ModuleBuffers(dict(enumerate(self.models)))}
        return {}

    def sharded_state(self) -> dict[str, Any]:
        """Return nothing: no state is sharded."""
        return {}

    def rank_state(self) -> Record:
        """Return nothing: Accelerate saves all that there is."""
        return Record()

    def load_rank_state(self, state: Record) -> None:
        """No-op."""

    def modules(self) -> list[Any]:
        """Return the DDP modules around the models."""
        if self._modules is None:
            self._modules = ddp_around(self.models) if self._accelerator.num_processes > 1 else []
        return self._modules

    def require_alike(self) -> None:
        """Compare the weights and the optimizers of all processes before the first save; of large tensors a sample.

        Raises:
            UnsupportedSetting: they differ.
        """
        if self._is_compared or self._accelerator.num_processes == 1:
            return
        self._is_compared = True
        weights = [dict(model.named_parameters()) for model in self.models]
        moments = [optimizer.state_dict()["state"] for optimizer in self.optimizers]
        states = {"weights": weights, "states of the optimizer": moments}
        digests = {what: value_digest(state, sampled_above=_SAMPLE) for what, state in states.items()}
        of_all = gather_object([digests])
        different = [what for what in states if len({each[what] for each in of_all}) > 1]
        if different:
            raise UnsupportedSetting(
                f"the processes hold different {' and '.join(different)}, as they do under LocalSGD or without DDP, "
                "and only those of the first process would be saved: let DDP keep them alike (prepare the model, and "
                "train without LocalSGD)"
            )

    def has_lost_buckets(self) -> bool:
        """Return whether DDP must be around a model, and was not found."""
        trained = any(each.requires_grad for model in self.models for each in model.parameters())
        return self._accelerator.num_processes > 1 and trained and not self.modules()

    def writing(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which ``save_state`` writes."""
        return contextlib.nullcontext()

    def owner_of(self, file: Path) -> int:
        """Return the rank that wrote a file."""
        return files.owner(file)

    def load(self, context: RestoreContext) -> None:
        """Load models, optimizers and schedulers, calling the hooks that ``load_state`` calls, and verify them."""
        for index, model in enumerate(self._prepared.call_load_hooks(self.models, context.path)):
            context.load_weights(model, read_weight_files([files.weights(context.files, index)]))
        self._prepared.load_optimizers(context)
        self._prepared.load_schedulers(context, self.schedulers)

    def close(self) -> None:
        """Remove what was hooked into optimizers."""
        self._steps.close()
