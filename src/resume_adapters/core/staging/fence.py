"""Nothing that is to be copied changes before it is copied: a change waits for the copy."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

from resume_adapters.core.patching import replaced


class Fence:
    """Keeps a state as it is from :meth:`arm` until it is copied.

    Optimizer steps wait, and loading a state dict into a module or an optimizer does. A step with a closure waits when
    the closure has returned, if the optimizer is torch's own: others may change weights before they call it.

    Args:
        waited: is called with the seconds that the training has waited.
    """

    def __init__(self, waited: Callable[[float], object]) -> None:
        self._waited = waited
        self._copied: threading.Event | None = None
        self._passed: Callable[[], object] = bool
        self._hooks = contextlib.ExitStack()

    def arm(self, copied: threading.Event, passed: Callable[[], object]) -> None:
        """Let the state stay as it is.

        Args:
            copied: is set when the state is copied.
            passed: is called when it is, before the state changes.
        """
        import torch
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self._copied, self._passed = copied, passed
        self._hooks.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        for owner in (torch.nn.Module, torch.optim.Optimizer):
            self._hooks.enter_context(replaced(owner, "load_state_dict", self._waiting(owner.load_state_dict)))

    def wait(self) -> None:
        """Wait until the state is copied, and let it change."""
        self._pass()
        self._hooks.close()

    def _pass(self) -> None:
        copied = self._copied
        if copied is None:
            return
        if not copied.is_set():
            began = time.monotonic()
            copied.wait()  # it may be interrupted, in a notebook: the next change waits again
            self._waited(time.monotonic() - began)
        self._copied = None
        passed, self._passed = self._passed, bool
        passed()

    def disarm(self) -> None:
        """Let the state change: it is not copied any more."""
        self._copied, self._passed = None, bool
        self._hooks.close()

    def _before_step(self, optimizer: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        # The hook stays until the next save: torch goes through its hooks now, and none may be removed meanwhile.
        if self._copied is None:
            return None
        closure = arguments[1] if len(arguments) > 1 else keywords.get("closure")
        if not callable(closure) or not type(optimizer).__module__.startswith("torch.optim."):
            self._pass()
            return None

        def then_wait(*given: Any, **named: Any) -> Any:
            result = closure(*given, **named)
            self._pass()
            return result

        if len(arguments) > 1:
            return (arguments[0], then_wait, *arguments[2:]), keywords
        return arguments, {**keywords, "closure": then_wait}

    def _waiting(self, native: Callable[..., Any]) -> Callable[..., Any]:
        def load_state_dict(*arguments: Any, **keywords: Any) -> Any:
            self.wait()
            return native(*arguments, **keywords)

        return load_state_dict
