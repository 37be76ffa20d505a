"""Which state of a module is whole, sharded, or different on each rank, by the strategy that trains it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from resume_adapters.core.state import sharded_digest
from resume_adapters.core.state.comparison import verify_equal
from resume_adapters.core.state.stateful import ModuleBuffers, Stateful
from resume_adapters.core.state.weights import verify_weights
from resume_adapters.lightning import engine
from resume_adapters.lightning.compat import pl


def is_sharded(trainer: Any) -> bool:
    """Return whether no rank holds the whole module: the strategy then loads weights and optimizers by itself."""
    return bool(trainer.strategy.restore_checkpoint_after_setup)


def saves_directories(strategy: Any) -> bool:
    """Return whether a strategy saves a directory, into which every rank writes its shards."""
    return (
        engine.is_used(strategy)
        or getattr(strategy, "_state_dict_type", "full") == "sharded"  # seam: lightning 2.4-2.6, as the line after
        or bool(getattr(strategy, "_save_distributed_checkpoint", False))
    )


def sharded_state(trainer: Any) -> dict[str, Any]:
    """Return what is sharded over the ranks, by the name of the component; of DeepSpeed's shards, nothing.

    DeepSpeed's shards are verified as they are loaded.
    """
    if not is_sharded(trainer) or engine.is_used(trainer.strategy):
        return {}
    optimizers = {f"optimizer {index}": each.state_dict() for index, each in enumerate(trainer.optimizers)}
    return {"model": dict(trainer.lightning_module.named_parameters()), **optimizers}


def invariants(trainer: Any, ranks: int) -> dict[str, int]:
    """Return settings that a resume must find unchanged: ranks share batches, or the accumulation has a schedule.

    Args:
        trainer: the trainer.
        ranks: number of ranks.
    """
    if any(isinstance(each, pl.callbacks.GradientAccumulationScheduler) for each in trainer.callbacks):
        return {"number of ranks": ranks, "accumulate_grad_batches": trainer.accumulate_grad_batches}
    if isinstance(trainer.strategy, pl.strategies.ModelParallelStrategy):
        parallel = trainer.strategy.device_mesh["tensor_parallel"].size()
        return {"tensor_parallel_size": parallel, **({"number of ranks": ranks} if parallel > 1 else {})}
    whole = isinstance(trainer.strategy, pl.strategies.SingleDeviceStrategy | pl.strategies.DDPStrategy)
    if whole and not engine.is_used(trainer.strategy):
        return {}
    return {"number of ranks": ranks, "accumulate_grad_batches": trainer.accumulate_grad_batches}


def verify(trainer: Any, saved: Mapping[str, Any], checkpoint: Path) -> None:
    """Verify what every rank holds whole.

    Args:
        trainer: the trainer.
        saved: what the trainer has read.
        checkpoint: the checkpoint, for the error.

    Raises:
        NotRestored: naming what differs.
    """
    content = saved.get("current_model_state") or saved.get("state_dict")
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    live = [("scheduler", "lr_schedulers", schedulers)]
    if not is_sharded(trainer):
        live.append(("optimizer", "optimizer_states", trainer.optimizers))
        if content:
            verify_weights(trainer.lightning_module, content, checkpoint)
    for name, key, things in live:
        for one, other in zip(saved.get(key, []), things, strict=False):
            verify_equal(name, one, other.state_dict())


def fingerprint(trainer: Any, parts: Mapping[str, Stateful]) -> str | None:
    """Return a digest of the state that a validation may change.

    Args:
        trainer: the trainer.
        parts: parts of the checkpoint beside Lightning's file.

    Returns:
        ``None`` where that cannot be compared: the weights are sharded, or something adds to a checkpoint when it is
        saved, as averages of the weights do.
    """
    module, data = trainer.lightning_module, trainer.datamodule
    adding_nothing = pl.LightningModule.on_save_checkpoint, pl.Callback.on_save_checkpoint
    hooked = [module, *trainer.callbacks]
    if is_sharded(trainer) or any(type(each).on_save_checkpoint not in adding_nothing for each in hooked):
        return None
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    return sharded_digest.fingerprint(
        {
            "model": module.state_dict(),
            "groups": [{name: value for name, value in group.items() if name != "params"} for group in groups],
            # A timer has a different state at any time.
            "callbacks": [each.state_dict() for each in trainer.callbacks if not isinstance(each, pl.callbacks.Timer)],
            "data": None if data is None else data.state_dict(),
            "parts": {name: part.state_dict() for name, part in parts.items()},
        }
    )


def buffers(trainer: Any) -> ModuleBuffers:
    """Return the buffers of the module, and of averages of it that callbacks hold: each rank has its own."""
    kept = {name: value for each in trainer.callbacks for name, value in vars(each).items()}
    averages = {name: value for name, value in kept.items() if _is_module(value)}
    return ModuleBuffers({"": trainer.lightning_module, **averages})


def _is_module(value: Any) -> bool:
    import torch

    return isinstance(value, torch.nn.Module)
