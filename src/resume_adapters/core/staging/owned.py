"""The storages that only an optimizer changes: parameters, and the state of their optimizer."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterable, Iterator
from typing import Any

SMALLEST = 1 << 16
"""Bytes from which on a storage is worth a copy of its own, later."""

_SAMPLE = 256
"""Bytes of a sample: at the beginning, in the middle and at the end of a storage."""


class OwnedStorage:
    """A storage on the CPU that only an optimizer changes, as far as is known.

    Args:
        name: what it holds, in a user's words.
        tensor: the parameter, or the optimizer's tensor.
        may_wait: it may be copied later.
    """

    def __init__(self, name: str, tensor: Any, *, may_wait: bool) -> None:
        self.name = name
        self.storage = tensor.untyped_storage()
        self.bytes = int(self.storage.nbytes())
        self.may_wait = may_wait
        self._tensor = tensor
        self._taken: tuple[Any, ...] = ()

    @property
    def address(self) -> int:
        """Where it is."""
        return int(self.storage.data_ptr())

    def sample(self) -> None:
        """Remember samples of the content."""
        self._taken = (self.address, self._tensor._version, *self._samples(self.address))

    @property
    def is_in_place(self) -> bool:
        """Whether the storage is where it was when it was sampled, as large as it was."""
        return (self.address, self.storage.nbytes()) == (self._taken[0], self.bytes)

    def is_as_sampled(self, copy: int) -> bool:
        """Return whether a copy is of what was sampled, as far as samples and the tensor's version tell.

        Args:
            copy: its address.
        """
        return self._taken == (self.address, self._tensor._version, *self._samples(copy))

    def _samples(self, address: int) -> list[bytes]:
        last = self.bytes - _SAMPLE
        return [ctypes.string_at(address + at, _SAMPLE) for at in (0, last // 2, last)]


def owned_storages(optimizers: Iterable[Any], restless: Collection[str], *, may_wait: bool) -> dict[int, OwnedStorage]:
    """Return the storages that only these optimizers change, by their addresses.

    Args:
        optimizers: those of torch, and what derives them. Others may change weights at any time, and are left out.
        restless: the names of what something else has been seen to change.
        may_wait: they may be copied later, but for those.
    """
    import torch

    found = {}
    for outer in optimizers:
        optimizer = outer
        while hasattr(optimizer, "optimizer"):  # what a framework wraps around it
            optimizer = optimizer.optimizer
        # torch lets its hooks be called by the step of each class that derives its Optimizer, and marks it.
        if not isinstance(optimizer, torch.optim.Optimizer) or not getattr(type(optimizer).step, "hooked", False):
            continue
        for name, tensor in _tensors(optimizer):
            if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "cpu":
                each = OwnedStorage(name, tensor, may_wait=may_wait and name not in restless)
                if each.bytes >= SMALLEST:
                    found[each.address] = each
    return found


def _tensors(optimizer: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parameters of an optimizer and what its state holds for each, after names for a user."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for number, parameter in enumerate(parameters):
        name = f"parameter {number} of {type(optimizer).__name__}"
        yield name, parameter
        for key, value in optimizer.state.get(parameter, {}).items():
            yield f"{key} of {name}", value
