"""The storages that only an optimizer changes: parameters, and the state of their optimizer."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import xxhash

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
        self._digest = b""

    @property
    def address(self) -> int:
        """Where it is."""
        return int(self.storage.data_ptr())

    @property
    def content(self) -> memoryview:
        """The bytes, as they are now."""
        return memoryview((ctypes.c_char * self.bytes).from_address(self.address)).cast("B")

    def sample(self, *, wholly: bool = False) -> None:
        """Remember samples of the content.

        Args:
            wholly: all of it, as a digest.
        """
        self._taken = (self.address, self._tensor._version, *self._samples(self.address))
        self._digest = xxhash.xxh3_64_digest(self.content) if wholly else b""

    @property
    def is_whole(self) -> bool:
        """Whether the storage is as large as it was."""
        return bool(self.storage.nbytes() == self.bytes)

    @property
    def is_in_place(self) -> bool:
        """Whether the storage is where it was when it was sampled, as large as it was."""
        return self.is_whole and self.address == self._taken[0]

    def is_as_sampled(self, copy: int | None = None) -> bool:
        """Return whether a copy is of what was sampled, as far as samples and the tensor's version tell.

        Args:
            copy: its address; by default the storage's own: whether nothing has changed, as far as the samples tell.
        """
        where = self.address if copy is None else copy
        if self._taken != (self.address, self._tensor._version, *self._samples(where)):
            return False
        return not self._digest or xxhash.xxh3_64_digest(self.content) == self._digest

    def _samples(self, address: int) -> list[bytes]:
        last = self.bytes - _SAMPLE
        return [ctypes.string_at(address + at, _SAMPLE) for at in (0, last // 2, last)]


def owned_storages(
    optimizers: Iterable[Any], followers: Mapping[str, Any], restless: Collection[str], *, may_wait: bool
) -> dict[int, OwnedStorage]:
    """Return the storages that only steps of these optimizers change, by their addresses.

    Args:
        optimizers: those of torch, and what derives them. Others may change weights at any time, and are left out.
        followers: further tensors, by names, that change only when the first of the optimizers has begun its step.
        restless: the names of what something else has been seen to change.
        may_wait: they may be copied later, but for those.
    """
    hooked = [each for each in map(_unwrapped, optimizers) if _is_hooked(each)]
    tensors = [*(followers.items() if hooked else ()), *(pair for each in hooked for pair in _tensors(each))]
    found = {}
    for name, whole in tensors:
        tensor = local_tensor(whole)
        # A step counter of each parameter is smaller.
        if _is_plain(tensor) and tensor.untyped_storage().nbytes() >= SMALLEST:
            owned = OwnedStorage(name, tensor, may_wait=may_wait and name not in restless)
            found[owned.address] = owned
    return found


def address_of(tensor: Any) -> int | None:
    """Return the address of a tensor's storage, as :func:`owned_storages` has it; ``None``: it has no such storage."""
    local = local_tensor(tensor)
    try:
        return int(local.untyped_storage().data_ptr()) if _is_plain(local) else None
    except RuntimeError:  # what torch.func wraps around a tensor has none
        return None


def _is_plain(tensor: Any) -> bool:
    """Return whether a tensor is one of torch's own, on the CPU."""
    import torch

    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "cpu"


def local_tensor(tensor: Any) -> Any:
    """Return the part of a tensor that this rank holds: its shard, or all of it."""
    if not hasattr(tensor, "to_local"):
        return tensor
    import torch

    with torch.no_grad():  # else the shard is wrapped for the gradients
        return tensor.to_local()


def _unwrapped(optimizer: Any) -> Any:
    while hasattr(optimizer, "optimizer"):  # what a framework wraps around it
        optimizer = optimizer.optimizer
    return optimizer


def _is_hooked(optimizer: Any) -> bool:
    """Return whether torch's hooks are called by its steps, as by those of each class that derives its Optimizer."""
    import torch

    return isinstance(optimizer, torch.optim.Optimizer) and getattr(type(optimizer).step, "hooked", False)


def _tensors(optimizer: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parameters of an optimizer and what its state holds for each, after names for a user."""
    import torch

    grouped = [each for group in optimizer.param_groups for each in group["params"]]
    # What ZeRO takes out of the groups between two steps has its state all the same.
    parameters = dict.fromkeys([*grouped, *(each for each in optimizer.state if isinstance(each, torch.Tensor))])
    for number, parameter in enumerate(parameters):
        name = f"parameter {number} of {type(optimizer).__name__}"
        yield name, parameter
        for key, value in optimizer.state.get(parameter, {}).items():
            yield f"{key} of {name}", value
