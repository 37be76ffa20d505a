"""Tensors that an optimizer trains and that are of no module, such as the poses of cameras, a prompt or an image."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from resume_adapters.core.ranks import current_world_size
from resume_adapters.core.state.stateful import TENSORS, Stateful, fill, is_optimizer, parameters_of


def are_saved(optimizers: Iterable[Any]) -> list[Any]:
    """Return the plain tensors that optimizers train: a ``Parameter`` is of a module, which may have more to save.

    Where there are several processes, nothing says that they train the same.
    """
    import torch

    if current_world_size() > 1:
        return []
    found = {id(each): each for each in parameters_of(*filter(is_optimizer, optimizers)) if type(each) is torch.Tensor}
    return list(found.values())


class TrainedTensors:
    """Such tensors as a part, in the order of their optimizers.

    Args:
        tensors: those.
    """

    def __init__(self, tensors: Sequence[Any]) -> None:
        self._tensors = tensors

    def state_dict(self) -> dict[str, Any]:
        """Return them, by number."""
        return {str(number): each.detach() for number, each in enumerate(self._tensors)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Give them the saved values."""
        for number, each in enumerate(self._tensors):
            fill(each, saved[str(number)])


def as_part(optimizers: Iterable[Any]) -> dict[str, Stateful]:
    """Return the part that has the plain tensors of these, if there are any."""
    tensors = are_saved(optimizers)
    return {TENSORS: TrainedTensors(tensors)} if tensors else {}
