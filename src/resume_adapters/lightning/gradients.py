"""The gradients that an unfinished accumulation has left for a later step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from resume_adapters.lightning.loops import Loops

Tree = dict[str, Any]


def capture(loops: Loops) -> Tree:
    """Return the gradients that a later step will use; of a sharded parameter, this rank's shard."""
    module = loops.trainer.lightning_module
    if module.automatic_optimization and not loops.is_accumulating:
        return {}
    found = ((name, parameter.grad) for name, parameter in module.named_parameters())
    return {name: _held(gradient) for name, gradient in found if gradient is not None}


def restore(module: Any, saved: Tree) -> None:
    """Put back what :func:`capture` returned."""
    import torch

    for name, parameter in module.named_parameters():
        if name in saved:
            parameter.grad = torch.zeros_like(parameter, dtype=saved[name].dtype)
            _held(parameter.grad).copy_(saved[name])


def mean(everyone: Sequence[Tree]) -> Tree:
    """Return what each rank is to hold, so that their mean is what that of those who saved would have been."""
    names = {name: None for each in everyone for name in each}
    return {name: sum(each[name] for each in everyone if name in each) / len(everyone) for name in names}


def _held(gradient: Any) -> Any:
    """Return what of a gradient is on this rank."""
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient
