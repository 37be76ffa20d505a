"""How an accelerator has placed what it prepared: replicated, sharded, or in a DeepSpeed engine."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from accelerate.utils import DistributedType

from resume_adapters.accelerate import compat
from resume_adapters.accelerate.engine import EngineStrategy
from resume_adapters.accelerate.replicated import ReplicatedStrategy
from resume_adapters.accelerate.sharded import ShardedStrategy
from resume_adapters.core.ranks import current_world_size
from resume_adapters.core.requirements import refuse
from resume_adapters.core.session.context import RestoreContext
from resume_adapters.core.state.records import Record
from resume_adapters.core.state.stateful import Stateful
from resume_adapters.errors import UnsupportedSetting


class AccelerateStrategy(Protocol):
    """Where models and optimizers are, and how they are saved and loaded.

    Attributes:
        models, optimizers, schedulers: what was prepared, as far as the strategy saves it itself.
        invariants: settings that a resume must find unchanged, in a user's words.
        rank_state_type: the record that :meth:`rank_state` returns.
    """

    models: list[Any]
    optimizers: list[Any]
    schedulers: list[Any]
    invariants: dict[str, int]
    rank_state_type: type[Record]

    def has_stepped(self) -> bool:
        """Return whether the batch ended an optimizer step; one that the scaler skipped counts."""

    def tensors(self) -> dict[str, Any]:
        """Return tensors with the names, dtypes and whole shapes of all models'."""

    def arguments(self) -> dict[str, Any]:
        """Return what was given to the strategy."""

    def parts(self) -> dict[str, Stateful]:
        """Return what Accelerate does not save and may differ between processes."""

    def sharded_state(self) -> Mapping[str, Any]:
        """Return what is sharded over the processes, by the name of the component."""

    def rank_state(self) -> Record:
        """Return what Accelerate does not save and belongs to this rank alone."""

    def load_rank_state(self, state: Any) -> None:
        """Restore what :meth:`rank_state` returned."""

    def modules(self) -> list[Any]:
        """Return the DDP modules around the models."""

    def compare(self) -> None:
        """Find out before the first save whether the processes hold different replicas; each saves its own then."""

    def has_lost_buckets(self) -> bool:
        """Return whether DDP must be around a model, and was not found."""

    def writing(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which ``save_state`` writes."""

    def owner_of(self, file: Path) -> int:
        """Return the rank that wrote a file."""

    def load(self, context: RestoreContext) -> None:
        """Load models, optimizers and schedulers, and verify them."""

    def close(self) -> None:
        """Remove what was hooked into optimizers."""


def choose_strategy(accelerator: Any, run_directory: Path) -> AccelerateStrategy:
    """Return how an accelerator has placed what it prepared, for checkpoints in a run directory.

    Raises:
        UnsupportedSetting: in a way that this package cannot resume, or with a setting that rules an exact resume out.
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
        "save_on_each_node=True scatters a checkpoint over nodes": (
            several and accelerator.project_configuration.save_on_each_node
        ),
        "even_batches=False gives the ranks different numbers of steps, and they save and stop together": (
            several and not accelerator.even_batches
        ),
    }
    refuse(refused)
