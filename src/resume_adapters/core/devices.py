"""What a save asks of an accelerator: by ``torch.accelerator`` and the device's own module, whatever it is called."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_PORTABLE = 1
"""The flag of ``cudaHostRegister`` by which the memory is pinned for every device."""


def pin(address: int, size: int, device: Any) -> Callable[[], object] | None:
    """Pin memory of the host, so that a device copies into it while the host goes on.

    Args:
        address: where the memory begins.
        size: bytes.
        device: a ``torch.device``.

    Returns:
        What undoes it; ``None`` where the device's module cannot pin memory that is there already, as CUDA's can.
    """
    import torch

    runtime = getattr(torch.get_device_module(device), "cudart", None)
    if runtime is None or int(runtime().cudaHostRegister(address, size, _PORTABLE)) != 0:
        return None
    return functools.partial(runtime().cudaHostUnregister, address)


def record_event(device: Any) -> Any:
    """Return an event that comes when a device has done all that its current stream has been given so far."""
    import torch

    return torch.accelerator.current_stream(device).record_event()
