"""How an accelerator has placed what it prepared: replicated, sharded, or in a DeepSpeed engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate
from accelerate.local_sgd import LocalSGD
from accelerate.utils import DistributedType, gather_object, load_fsdp_model, load_fsdp_optimizer
from accelerate.utils.deepspeed import DeepSpeedSchedulerWrapper  # there without DeepSpeed too

from resume_adapters.accelerate import files
from resume_adapters.accelerate.strategy import Strategy, component_name
from resume_adapters.core.checkpoint.native_files import read_weight_files
from resume_adapters.core.loop.replicas import Replicas, reducers
from resume_adapters.core.patching import wrapped
from resume_adapters.core.ranks import current_world_size
from resume_adapters.core.requirements import is_older, refuse
from resume_adapters.core.session.context import RestoreContext
from resume_adapters.core.session.rehearsal import NotRehearsed, copies, overwrite
from resume_adapters.core.state.records import Record
from resume_adapters.core.state.stateful import ModuleBuffers, Stateful
from resume_adapters.core.state.weights import updated
from resume_adapters.errors import UnsupportedSetting
from resume_adapters.integrations.accelerate_state import reading_shards
from resume_adapters.integrations.deepspeed_engine.names import EngineRankState

_SHARDING = "1.9"
"""From this version on, FSDP2 loads the full state on every process, and DeepSpeed accumulates under ZeRO-2 and 3."""


@dataclass
class ReplicatedRankState(Record):
    """What Accelerate does not save of a process under DDP.

    Attributes:
        local_steps: the steps that the ``LocalSGD`` has counted that the script is in; ``None`` where it is in none.
    """

    local_steps: int | None = None


class ReplicatedStrategy(Strategy):
    """Every process has the whole model: one process, or DDP."""

    rank_state_type = ReplicatedRankState

    def __init__(self, accelerator: Any) -> None:
        super().__init__(accelerator)
        self._modules: list[Any] | None = None
        self._replicas = Replicas(self.models, self.optimizers, lambda value: gather_object([value]))
        self._local = LocalSteps(accelerator, self._replicas.train_apart)

    def parts(self) -> dict[str, Stateful]:
        """Return the buffers, where each process has its own, or all that is trained, where processes train apart."""
        if any(not each.broadcast_buffers for each in self.modules()):
            return {"buffers": ModuleBuffers(dict(enumerate(self.models))), **self._replicas.parts()}
        return self._replicas.parts()

    def rank_state(self) -> ReplicatedRankState:
        """Return the count of ``LocalSGD``."""
        return ReplicatedRankState(self._local.count)

    def load_rank_state(self, state: ReplicatedRankState) -> None:
        """Restore the count of ``LocalSGD``."""
        self._local.restore(state.local_steps)

    def modules(self) -> list[Any]:
        """Return the DDP modules around the models; ``prepare`` hands them to the script and keeps no reference."""
        if self._modules is None:
            self._modules = reducers(self.models)
        return self._modules

    def compare(self) -> None:
        """Find out before the first save whether the processes hold different weights; each saves its own then."""
        if self.accelerator.num_processes > 1:
            self._replicas.compare()

    def has_lost_buckets(self) -> bool:
        """Return whether DDP must be around a model, and was not found."""
        trained = any(each.requires_grad for model in self.models for each in model.parameters())
        return self.accelerator.num_processes > 1 and trained and not self.modules()

    def load(self, context: RestoreContext) -> None:
        """Load models, optimizers and schedulers, calling the hooks that ``load_state`` calls."""
        self._load_models(context, self.call_load_hooks(self.models, context.path))
        self._load_each(context, "optimizer", self.optimizers)
        self._replicas.expect(context)
        self.load_schedulers(context)

    def rehearse(self, context: RestoreContext) -> None:
        """Load models, optimizers and schedulers into copies, and verify them."""
        if self.accelerator._load_model_state_pre_hook:  # seam: accelerate 1.15
            raise NotRehearsed("hooks of the script load it, and may reach what trains")
        if not self.accelerator.is_main_process:
            return
        live = {"models": self.models, "optimizers": self.optimizers, "schedulers": self.schedulers}
        held = (getattr(each, name, None) for each in [*self.optimizers, *self.schedulers] for name in _OF_ACCELERATOR)
        made = copies(live, [self.accelerator, *held])
        for model in made["models"]:
            overwrite(updated(model).values())
        self._load_models(context, made["models"])
        self._load_each(context, "optimizer", made["optimizers"])
        self._load_each(context, "scheduler", made["schedulers"])
        context.prove()

    def _load_models(self, context: RestoreContext, models: Iterable[Any]) -> None:
        for index, model in enumerate(models):
            context.load_weights(model, read_weight_files([files.weights(context.files, index)]))

    def _load_each(self, context: RestoreContext, kind: str, things: Iterable[Any]) -> None:
        for index, each in enumerate(things):
            saved = files.pickled(context.files, kind, index)
            context.load_state(component_name(kind, index), each, saved)

    def close(self) -> None:
        """Remove what was hooked into optimizers and ``LocalSGD``."""
        super().close()
        self._local.close()


_OF_ACCELERATOR = ("accelerator_state", "gradient_state")
"""What a prepared optimizer or scheduler holds of the accelerator."""


class LocalSteps:
    """Counts and restores the steps of the ``LocalSGD`` that the script has entered.

    Args:
        accelerator: an ``accelerate.Accelerator``; a ``LocalSGD`` of another is left alone.
        entered: is called when the script enters one.
    """

    def __init__(self, accelerator: Any, entered: Callable[[], None]) -> None:
        self._accelerator = accelerator
        self._entered = entered
        self._current: Any = None
        self._resumed: int | None = None
        self._wrapped = contextlib.ExitStack()
        self._wrapped.enter_context(wrapped(LocalSGD, "__enter__", self._enter))
        self._wrapped.enter_context(wrapped(LocalSGD, "__exit__", self._leave))

    @property
    def count(self) -> int | None:
        """The steps of the one that the script is in; ``None`` where it is in none."""
        return None if self._current is None else self._current.num_steps

    def restore(self, count: int | None) -> None:
        """Set the count of the one that the script is in, or enters next; ``None`` leaves it its own."""
        self._resumed = count
        self._continue()

    def _continue(self) -> None:
        if self._current is not None and self._resumed is not None:
            self._current.num_steps, self._resumed = self._resumed, None

    def _enter(self, native: Callable[[Any], Any], local: Any) -> Any:
        entered = native(local)
        if local.enabled and local.accelerator is self._accelerator:
            self._current = local
            self._entered()
            self._continue()
        return entered

    def _leave(self, native: Callable[..., None], local: Any, *error: Any) -> None:
        native(local, *error)
        if self._current is local:
            self._current = None

    def close(self) -> None:
        """Leave ``LocalSGD`` as it was."""
        self._wrapped.close()


class ShardedStrategy(Strategy):
    """FSDP2: every process has a shard of each tensor. Torch reads the files on any number of ranks."""

    def parts(self) -> dict[str, Stateful]:
        """Return the buffers; each process has its own."""
        return {"buffers": ModuleBuffers(dict(enumerate(self.models)))}

    def sharded_state(self) -> dict[str, Any]:
        """Return the models' parameters and the optimizers' state, by the name of each model and optimizer."""
        models, optimizers = enumerate(self.models), enumerate(self.optimizers)
        return {
            **{component_name("model", index): dict(each.named_parameters()) for index, each in models},
            **{component_name("optimizer", index): each.state_dict() for index, each in optimizers},
        }

    def load(self, context: RestoreContext) -> None:
        """Load models and optimizers by Accelerate, and then the schedulers."""
        path, plugin = str(context.path), self.accelerator.state.fsdp_plugin
        with reading_shards(plugin, context.files):
            for index, model in enumerate(self.models):
                load_fsdp_model(plugin, self.accelerator, model, path, index)
            for index, (optimizer, model) in enumerate(zip(self.optimizers, self.models, strict=False)):
                if "SHARDED" in str(plugin.state_dict_type) and is_older(accelerate.__version__, "1.13"):
                    _load_sharded(optimizer.optimizer, model, context.path / f"optimizer_{index}")
                else:
                    load_fsdp_optimizer(plugin, self.accelerator, optimizer, model, path, index)
        self._steps = 0  # torch makes the state that it fills by a step that changes nothing
        self.call_load_hooks([], context.path)
        context.add_proof(lambda: context.verify_shards(self.sharded_state), is_shared=True)
        self.load_schedulers(context)


def _load_sharded(optimizer: Any, model: Any, directory: Path) -> None:
    """Load an optimizer's shards; Accelerate reads them into the state before the first step, which is none."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load

    saved = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    load(saved, checkpoint_id=directory)
    set_optimizer_state_dict(model, optimizer, saved["optimizer"])


class EngineStrategy(Strategy):
    """A DeepSpeed engine has the model and the optimizer; Accelerate's plugin for it allows one.

    Args:
        accelerator: an ``accelerate.Accelerator``, after ``prepare``.

    Raises:
        UnsupportedSetting: a setting of DeepSpeed rules an exact resume out.
    """

    rank_state_type = EngineRankState

    def __init__(self, accelerator: Any, run_directory: Path) -> None:
        from resume_adapters.integrations.deepspeed_engine.engine import attach_engine

        super().__init__(accelerator, counts_steps=False)
        (engine,) = self.models
        self._engine = attach_engine(engine, run_directory)
        # A schedule that the engine has is saved by the engine.
        self.schedulers = [each for each in self.schedulers if not isinstance(each, DeepSpeedSchedulerWrapper)]
        self.invariants |= self._engine.invariants

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

    def rank_state(self) -> EngineRankState:
        """Return what DeepSpeed does not save and belongs to this rank alone."""
        return self._engine.rank_state()

    def load_rank_state(self, state: EngineRankState) -> None:
        """Restore what :meth:`rank_state` returned."""
        self._engine.load_rank_state(state)

    def writing(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which DeepSpeed writes data only."""
        return self._engine.saving()

    def load(self, context: RestoreContext) -> None:
        """Load by DeepSpeed, and then the schedulers that it does not know."""
        self._engine.load(context, context.path, "pytorch_model")
        self.call_load_hooks([], context.path)
        self.load_schedulers(context)
        self._engine.add_proof(context)

    def close(self) -> None:
        """Undo what was wrapped in the engine."""
        self._engine.close()


def choose_strategy(accelerator: Any, run_directory: Path) -> Strategy:
    """Return how an accelerator has placed what it prepared, for checkpoints in a run directory.

    Raises:
        UnsupportedSetting: in a way that this package cannot resume, or with a setting that rules an exact resume out.
    """
    kind, reason = accelerator.distributed_type, ""
    if kind in (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU):
        return ReplicatedStrategy(accelerator)
    if kind == DistributedType.DEEPSPEED and len(accelerator._models) == 1:  # seam: accelerate 1.15
        _require_sharding("DeepSpeed")
        return EngineStrategy(accelerator, run_directory)
    if kind == DistributedType.FSDP and accelerator.is_fsdp2:
        _require_sharding("FSDP2")
        return ShardedStrategy(accelerator)
    if kind == DistributedType.FSDP:
        reason = "FSDP1 flattens the parameters: use fsdp_version=2, which starts from its checkpoints, too"
    elif kind == DistributedType.DEEPSPEED:
        reason = "with DeepSpeed one model is to be prepared before register_for_resume is called"
    raise UnsupportedSetting(
        f"{kind} shards or moves the state in a way that this package does not support, so this run cannot be "
        f"resumed exactly: {reason or 'train with DDP, FSDP2 or DeepSpeed'}"
    )


def require_supported(accelerator: Any) -> None:
    """Refuse settings under which a resume cannot be exact.

    Raises:
        UnsupportedSetting: naming the setting and what to do.
    """
    several = accelerator.num_processes > 1
    world_size = current_world_size()
    refused = {
        f"Accelerate counts {accelerator.num_processes} processes where torch.distributed has {world_size}, so each "
        "would write the files of all (make the Accelerator before the process group, or with cpu=True)": (
            world_size != accelerator.num_processes
        ),
        "save_on_each_node=True is needless, also on disks of the nodes": (
            several and accelerator.project_configuration.save_on_each_node
        ),
        "even_batches=False gives the ranks different numbers of steps, and they save and stop together": (
            several and not accelerator.even_batches
        ),
    }
    refuse(refused)


def _require_sharding(strategy: str) -> None:
    """Refuse a strategy that spreads the state over the processes, where Accelerate is too old to load it.

    Args:
        strategy: its name, in a user's words.

    Raises:
        UnsupportedSetting: naming the version that is installed, and the one that serves.
    """
    if is_older(accelerate.__version__, _SHARDING):
        raise UnsupportedSetting(
            f"with accelerate {accelerate.__version__} a run under {strategy} cannot be resumed exactly, which needs "
            f"{_SHARDING} or newer: pip install --upgrade accelerate, or train with DDP"
        )
