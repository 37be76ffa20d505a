"""Whether the device that this process uses still answers."""

from __future__ import annotations

import threading
from collections.abc import Callable


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
