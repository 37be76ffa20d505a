"""What is asked of an accelerator: by ``torch.accelerator`` and the device's own module, whatever it is called."""

from __future__ import annotations

import functools
import threading
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


def require_device(seconds: float) -> None:
    """Check that the accelerator that this process uses, if it uses one, still answers.

    Args:
        seconds: within which it must.

    Raises:
        RuntimeError: it does not.
    """
    import torch

    if is_accelerator_used():  # pragma: no cover  # the tests run where there is no accelerator
        device = torch.accelerator.current_accelerator()

        def ask() -> None:
            torch.zeros(1, device=device).add_(1)
            torch.accelerator.synchronize()

        require_answer(ask, seconds)


def is_accelerator_used() -> bool:
    """Return whether this process has initialised an accelerator, of whatever kind."""
    import torch

    device = torch.accelerator.current_accelerator()  # of this build of torch: the question initialises nothing
    if device is None:
        return False
    module = torch.get_device_module(device)  # pragma: no cover  # as above; not every one says whether it is in use
    return bool(getattr(module, "is_initialized", torch.accelerator.is_available)())  # pragma: no cover


def require_answer(ask: Callable[[], object], seconds: float) -> None:
    """Check that a question is answered; a thread that waits for ever is left behind.

    Raises:
        RuntimeError: it is not answered in time, or with an error.
    """
    answers: list[Exception | None] = []

    def run() -> None:
        try:
            ask()
            answers.append(None)
        except Exception as error:  # of any kind: another thread raises it
            answers.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not answers:
        raise RuntimeError(f"the device does not answer within {seconds:g} s")
    if answers[0] is not None:
        raise RuntimeError("the device does not answer") from answers[0]
