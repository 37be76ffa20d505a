"""What differs by the strategy that trains: DeepSpeed's engine, shards, and what each rank has of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from resume_adapters.core.requirements import refuse
from resume_adapters.core.state import sharded_digest
from resume_adapters.core.state.comparison import verify_equal
from resume_adapters.core.state.loading import copied
from resume_adapters.core.state.stateful import ModuleBuffers, Stateful
from resume_adapters.core.state.weights import verify_weights
from resume_adapters.integrations import model_parallel
from resume_adapters.lightning.compat import pl
from resume_adapters.lightning.files import OF_OPTIMIZERS
from resume_adapters.lightning.loops import Loops

if TYPE_CHECKING:
    from resume_adapters.integrations.deepspeed_engine.engine import EngineState

TAG = "checkpoint"
"""What Lightning calls the directory of DeepSpeed's files in a checkpoint."""


def is_deepspeed(strategy: Any) -> bool:
    """Return whether DeepSpeed trains."""
    return isinstance(strategy, pl.strategies.DeepSpeedStrategy)


def engine_state(strategy: Any, run_directory: Path) -> EngineState | None:
    """Return the state of the engine, where DeepSpeed trains; only after the strategy is set up.

    Raises:
        UnsupportedSetting: a setting of DeepSpeed rules an exact resume out.
    """
    if not is_deepspeed(strategy):
        return None
    from resume_adapters.integrations.deepspeed_engine import engine

    return engine.attach_engine(strategy.deepspeed_engine, run_directory)


def require_whole_accumulations(trainer: Any) -> None:
    """Refuse epochs that end while gradients are accumulated.

    DeepSpeed accumulates on into the next epoch, in which Lightning counts its batches from 0. From there on, where
    Lightning counts a step and saves, DeepSpeed is in the middle of one.

    Raises:
        UnsupportedSetting: an epoch is no multiple of the accumulation.
    """
    accumulated, batches = trainer.accumulate_grad_batches, trainer.num_training_batches
    rest = math.isfinite(batches) and batches % accumulated
    refuse({f"accumulate_grad_batches={accumulated} does not divide the {batches} batches of an epoch": rest}, _LIMIT)


def require_no_accumulation(engine: EngineState) -> None:
    """Refuse to save while gradients are accumulated.

    Raises:
        UnsupportedSetting: DeepSpeed holds some.
    """
    refuse(
        {"a checkpoint is due while DeepSpeed accumulates gradients, which it does not save": engine.is_accumulating()},
        _LIMIT,
    )


_LIMIT = (
    "let each epoch have a multiple of accumulate_grad_batches (limit_train_batches), and save and validate after one"
)


def is_sharded(trainer: Any) -> bool:
    """Return whether no rank holds the whole module: the strategy then loads weights and optimizers by itself."""
    return bool(trainer.strategy.restore_checkpoint_after_setup)


def saves_directories(strategy: Any) -> bool:
    """Return whether a strategy saves a directory, into which every rank writes its shards."""
    return (
        is_deepspeed(strategy)
        or getattr(strategy, "_state_dict_type", "full") == "sharded"  # seam: lightning 2.4-2.6
        or model_parallel.saves_directories(strategy)
    )


def sharded_state(trainer: Any) -> dict[str, Any]:
    """Return what is sharded over the ranks, by the name of the component; of DeepSpeed's shards, nothing.

    DeepSpeed's shards are verified as they are loaded.
    """
    if not is_sharded(trainer) or is_deepspeed(trainer.strategy):
        return {}
    optimizers = {f"optimizer {index}": each.state_dict() for index, each in enumerate(trainer.optimizers)}
    return {"model": dict(trainer.lightning_module.named_parameters()), **optimizers}


def invariants(trainer: Any, ranks: int) -> dict[str, int]:
    """Return settings that a resume must find unchanged: ranks share batches, or the accumulation has a schedule."""
    fixed = {"number of ranks": ranks, "accumulate_grad_batches": trainer.accumulate_grad_batches}
    if any(isinstance(each, pl.callbacks.GradientAccumulationScheduler) for each in trainer.callbacks):
        return fixed
    if model_parallel.is_model_parallel(trainer.strategy):
        return model_parallel.invariants(trainer.strategy, ranks)
    # DeepSpeed's is a DDPStrategy, too.
    return {} if isinstance(trainer.strategy, pl.strategies.SingleDeviceStrategy | pl.strategies.DDPStrategy) else fixed


def load_copies(native: Callable[[dict[str, Any]], None], checkpoint: dict[str, Any]) -> None:
    """Have optimizers and schedules load copies: what trains neither lies in the file nor is what proves the load.

    Args:
        native: the strategy's own load of optimizers; the trainer loads schedules from the same dict after it.
    """
    checkpoint.update(copied({name: checkpoint[name] for name in OF_OPTIMIZERS if name in checkpoint}))
    native(checkpoint)


def load_again(trainer: Any, saved: Mapping[str, Any]) -> None:
    """Load the weights, optimizers and schedules once more, of what the trainer has read."""
    if not is_sharded(trainer):
        trainer.strategy.load_model_state_dict(dict(saved), strict=trainer.lightning_module.strict_loading)
        trainer.strategy.load_optimizer_state_dict(dict(saved))
    for config, state in zip(trainer.lr_scheduler_configs, saved["lr_schedulers"], strict=True):
        config.scheduler.load_state_dict(copied(state))


def verify(trainer: Any, saved: Mapping[str, Any], checkpoint: Path) -> None:
    """Verify what every rank holds whole.

    Args:
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
    averages = {name: value for name, value in kept.items() if isinstance(value, torch.nn.Module)}
    return ModuleBuffers({"": trainer.lightning_module, **averages})


def capture_gradients(loops: Loops) -> dict[str, Any]:
    """Capture the gradients that a later step will use; of a sharded parameter, this rank's shard."""
    module = loops.trainer.lightning_module
    if module.automatic_optimization and not loops.is_accumulating:
        return {}
    found = ((name, parameter.grad) for name, parameter in module.named_parameters())
    return {name: _local(gradient) for name, gradient in found if gradient is not None}


def restore_gradients(module: Any, saved: dict[str, Any]) -> None:
    """Restore what :func:`capture_gradients` returned."""
    for name, parameter in module.named_parameters():
        if name in saved and saved[name].is_sparse:
            parameter.grad = saved[name].to(parameter.device)
        elif name in saved:
            parameter.grad = torch.zeros_like(parameter, dtype=saved[name].dtype)
            _local(parameter.grad).copy_(saved[name])


def mean_gradients(saved: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the gradients that every rank is to hold, so that their mean is that of the ranks that saved.

    Args:
        saved: what :func:`capture_gradients` returned on each rank that saved.
    """
    names = {name: None for each in saved for name in each}
    return {name: sum(each[name] for each in saved if name in each) / len(saved) for name in names}


def _local(gradient: Any) -> Any:
    """Return the shard of a gradient that is on this rank; the gradient itself where it is not sharded."""
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient
