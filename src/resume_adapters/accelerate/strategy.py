"""Models and optimizers that are cut over the processes, and which strategy an accelerator trains with."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from accelerate.utils import DistributedType, load_fsdp_model
from accelerate.utils.deepspeed import DeepSpeedSchedulerWrapper  # there without DeepSpeed too

from resume_adapters.accelerate import compat, files
from resume_adapters.accelerate.replicated import ReplicatedStrategy, named
from resume_adapters.core.session.session import Session
from resume_adapters.core.state.stateful import ModuleBuffers, Stateful
from resume_adapters.errors import UnsupportedSetting
from resume_adapters.integrations.deepspeed_engine import names

Tree = dict[str, Any]


class ShardedStrategy(ReplicatedStrategy):
    """Every process has a shard of each tensor: FSDP2. Accelerate and torch read its files, on any number of ranks."""

    def parts(self) -> dict[str, Stateful]:
        """Return the buffers, which each process has for itself."""
        return {"buffers": ModuleBuffers(dict(enumerate(self.models)))}

    def has_lost_buckets(self) -> bool:
        """Return False: FSDP2 has none."""
        return False

    def spread(self) -> Tree:
        """Return the models' parameters and the optimizers' state, by the name of each model and optimizer."""
        models = {named("model", index): dict(each.named_parameters()) for index, each in enumerate(self.models)}
        optimizers = {named("optimizer", index): each.state_dict() for index, each in enumerate(self.optimizers)}
        return {**models, **optimizers}

    def load(self, session: Session) -> None:
        """Let Accelerate load models and optimizers, prove them, and load the schedulers."""
        assert session.checkpoint is not None
        path, plugin = session.checkpoint.path, self.accelerator.state.fsdp_plugin
        for index, model in enumerate(self.models):
            load_fsdp_model(plugin, self.accelerator, model, str(path), index)
        for index, (optimizer, model) in enumerate(zip(self.optimizers, self.models, strict=False)):
            compat.load_optimizer(self.accelerator, optimizer, model, path, index)
        self._steps = 0  # torch makes the state that it fills by a step that changes nothing
        self._left_by_hooks([], path)
        session.prove_shares()
        self._load_pickled(session, "scheduler", self.schedulers)


class EngineStrategy(ReplicatedStrategy):
    """A DeepSpeed engine has the model and the optimizer; Accelerate's plugin for it allows one.

    Args:
        accelerator: an ``accelerate.Accelerator``, after ``prepare``.
        run_directory: where checkpoints go.

    Raises:
        UnsupportedSetting: a setting of DeepSpeed rules an exact resume out.
    """

    def __init__(self, accelerator: Any, run_directory: Path) -> None:
        from resume_adapters.integrations.deepspeed_engine.engine import attach_engine

        (engine,) = accelerator._models  # seam: accelerate 1.15
        self._engine = attach_engine(engine, run_directory)
        super().__init__(accelerator)
        self.fixed |= self._engine.fixed
        # A schedule that the engine has is saved by the engine.
        self.schedulers = [each for each in self.schedulers if not isinstance(each, DeepSpeedSchedulerWrapper)]

    def _observe_steps(self) -> None:
        """Leave the counting to the engine."""

    def has_stepped(self) -> bool:
        """Return whether the engine counted a step; one that overflowed counts."""
        return self._engine.has_stepped()

    def tensors(self) -> Tree:
        """Return the model's tensors, without content."""
        return self._engine.state_dict()

    def has_lost_buckets(self) -> bool:
        """Return False: DeepSpeed has buckets of its own, in a fixed order."""
        return False

    def parts(self) -> dict[str, Stateful]:
        """Return what DeepSpeed does not save."""
        return self._engine.parts()

    def own(self) -> Tree:
        """Return what DeepSpeed does not save and belongs to this rank alone."""
        return self._engine.own()

    def restore(self, own: Tree) -> None:
        """Put it back."""
        self._engine.restore(own)

    def writing(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which DeepSpeed writes data only."""
        return self._engine.data_only()

    def owner(self, file: Path) -> int:
        """Return the rank that wrote a file."""
        return names.owner(file) or files.owner(file)

    def load(self, session: Session) -> None:
        """Let DeepSpeed load, and load the schedulers that it does not know."""
        assert session.checkpoint is not None
        path = session.checkpoint.path
        self._engine.load(session, path, "pytorch_model")
        self._left_by_hooks([], path)
        self._load_pickled(session, "scheduler", self.schedulers)


def choose_strategy(accelerator: Any, run_directory: Path) -> ReplicatedStrategy:
    """Return how an accelerator has placed what it prepared, for checkpoints in a run directory.

    Raises:
        UnsupportedSetting: in a way that cannot be followed, or with a setting that rules an exact resume out.
    """
    kind, reason = accelerator.distributed_type, ""
    if kind in (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU):
        return ReplicatedStrategy(accelerator)
    if kind == DistributedType.DEEPSPEED and len(accelerator._models) == 1:  # seam: accelerate 1.15
        compat.require_sharding("DeepSpeed")
        return EngineStrategy(accelerator, run_directory)
    if kind == DistributedType.FSDP and accelerator.is_fsdp2:
        compat.require_sharding("FSDP2")
        return ShardedStrategy(accelerator)
    if kind == DistributedType.FSDP:
        reason = "FSDP1 flattens the parameters: use fsdp_version=2"
    elif kind == DistributedType.DEEPSPEED:
        reason = "with DeepSpeed one model is to be prepared before register_for_resume is called"
    raise UnsupportedSetting(
        f"{kind} shards or moves the state in a way that is not followed, so this run cannot be resumed exactly: "
        f"{reason or 'train with DDP, FSDP2 or DeepSpeed'}"
    )
