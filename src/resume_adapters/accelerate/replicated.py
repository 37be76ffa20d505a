"""Models and optimizers of which every process has the whole: one process, or DDP."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object

from resume_adapters.accelerate import files
from resume_adapters.accelerate.loaders import LocalSteps
from resume_adapters.accelerate.prepared import Prepared, StepCounter, ddp_around
from resume_adapters.core.checkpoint.native_files import read_weight_files
from resume_adapters.core.loop.replicas import Replicas
from resume_adapters.core.session.context import RestoreContext
from resume_adapters.core.state.records import Record
from resume_adapters.core.state.stateful import ModuleBuffers, Stateful


@dataclass
class ReplicatedRankState(Record):
    """What Accelerate does not save of a process under DDP.

    Attributes:
        local_steps: the steps that the ``LocalSGD`` has counted that the script is in; ``None`` where it is in none.
    """

    local_steps: int | None = None


class ReplicatedStrategy:
    """Every process has the whole model.

    Args:
        accelerator: an ``accelerate.Accelerator``, after ``prepare``.
    """

    rank_state_type: type[Record] = ReplicatedRankState

    def __init__(self, accelerator: Any) -> None:
        self._prepared = Prepared(accelerator)
        self._accelerator = accelerator
        self._steps = StepCounter(self._prepared)
        self._modules: list[Any] | None = None
        self.models = self._prepared.models
        self.optimizers = self._prepared.optimizers
        self.schedulers = self._prepared.schedulers
        self.invariants = self._prepared.invariants
        self._replicas = Replicas(self.models, self.optimizers, lambda value: gather_object([value]))
        self._local = LocalSteps(accelerator, self._replicas.train_apart)

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
        """Return the buffers, where each process has its own, or all that is trained, where processes train apart."""
        if any(not each.broadcast_buffers for each in self.modules()):
            return {"buffers": ModuleBuffers(dict(enumerate(self.models))), **self._replicas.parts()}
        return self._replicas.parts()

    def sharded_state(self) -> dict[str, Any]:
        """Return nothing: no state is sharded."""
        return {}

    def rank_state(self) -> ReplicatedRankState:
        """Return the count of ``LocalSGD``."""
        return ReplicatedRankState(self._local.count)

    def load_rank_state(self, state: ReplicatedRankState) -> None:
        """Restore the count of ``LocalSGD``."""
        self._local.restore(state.local_steps)

    def modules(self) -> list[Any]:
        """Return the DDP modules around the models."""
        if self._modules is None:
            self._modules = ddp_around(self.models) if self._accelerator.num_processes > 1 else []
        return self._modules

    def compare(self) -> None:
        """Find out before the first save whether the processes hold different weights; each saves its own then."""
        if self._accelerator.num_processes > 1:
            self._replicas.compare()

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
        self._replicas.expect(context)

    def close(self) -> None:
        """Remove what was hooked into optimizers and ``LocalSGD``."""
        self._steps.close()
        self._local.close()
