"""The gradients that an unfinished accumulation has left for a later step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from resume_adapters.lightning.loops import Loops


def capture(loops: Loops) -> dict[str, Any]:
    """Capture the gradients that a later step will use; of a sharded parameter, this rank's shard."""
    module = loops.trainer.lightning_module
    if module.automatic_optimization and not loops.is_accumulating:
        return {}
    found = ((name, parameter.grad) for name, parameter in module.named_parameters())
    return {name: _local(gradient) for name, gradient in found if gradient is not None}


def restore(module: Any, saved: dict[str, Any]) -> None:
    """Restore what :func:`capture` returned."""
    import torch

    for name, parameter in module.named_parameters():
        if name in saved:
            parameter.grad = torch.zeros_like(parameter, dtype=saved[name].dtype)
            _local(parameter.grad).copy_(saved[name])


def mean(saved: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the gradients that every rank is to hold, so that their mean is that of the ranks that saved.

    Args:
        saved: what :func:`capture` returned on each rank that saved.
    """
    names = {name: None for each in saved for name in each}
    return {name: sum(each[name] for each in saved if name in each) / len(saved) for name in names}


def _local(gradient: Any) -> Any:
    """Return the shard of a gradient that is on this rank; the gradient itself where it is not sharded."""
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient
