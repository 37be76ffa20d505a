"""Nothing that is to be copied changes before it is copied: a change waits for the copy."""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from resume_adapters.core.patching import replaced
from resume_adapters.core.staging.owned import address_of


class Copies:
    """What of a state is still to be copied. Any thread may wait for one storage, or for all of them.

    Args:
        addresses: those of the storages; one may be copied more than once.
    """

    def __init__(self, addresses: Iterable[int]) -> None:
        self._missing = collections.Counter(addresses)
        self._changed = threading.Condition()

    @property
    def are_done(self) -> bool:
        """Whether nothing is to be copied any more."""
        return not self._missing

    def is_missing(self, address: int) -> bool:
        """Return whether a storage is still to be copied."""
        return address in self._missing

    def done(self, address: int) -> None:
        """Say that a storage is copied, once."""
        with self._changed:
            self._missing[address] -= 1
            if self._missing[address] <= 0:
                del self._missing[address]
            self._changed.notify_all()

    def end(self) -> None:
        """Say that nothing is to be copied any more."""
        with self._changed:
            self._missing.clear()
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait until everything is copied."""
        with self._changed:
            self._changed.wait_for(lambda: self.are_done)

    def wait_for(self, address: int) -> None:
        """Wait until a storage is copied."""
        with self._changed:
            self._changed.wait_for(lambda: not self.is_missing(address))


class Fence:
    """Keeps a state as it is from :meth:`arm` until it is copied.

    Optimizer steps wait, and loading a state dict into a module or an optimizer does. A step with a closure waits when
    the closure has returned, if the optimizer is torch's own: others may change weights before that. Code that
    asks a module for its parameters may change them, as do averages that take the place of the weights in a validation:
    each parameter is given out once it is copied. Those that hold the parameters already do so when the module has been
    set to evaluate: that waits, too.

    Args:
        waited: is called with the seconds that the training has waited.
    """

    def __init__(self, waited: Callable[[float], object]) -> None:
        self._waited = waited
        self._copies: Copies | None = None
        self._passed: Callable[[], object] = bool
        self._hooks = contextlib.ExitStack()
        self._lasting = contextlib.ExitStack()

    def install(self) -> None:
        """Watch who asks for parameters, or sets a module to evaluate, until :meth:`disarm`.

        From here on, and not from a save to the step after it: where a model asks in its own forward pass, torch would
        compile it again each time.
        """
        from torch.nn import Module

        # parameters() calls the one, and eval() the other.
        for name, waiting in (("named_parameters", self._one_by_one), ("train", self._before_evaluation)):
            self._lasting.enter_context(replaced(Module, name, waiting(getattr(Module, name))))

    def arm(self, copies: Copies, passed: Callable[[], object]) -> None:
        """Let the state stay as it is.

        Args:
            copies: what is to be copied.
            passed: is called when it is, before a step, a load or the next save.
        """
        import torch
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self._copies, self._passed = copies, passed
        self._hooks.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        for owner in (torch.nn.Module, torch.optim.Optimizer):
            self._hooks.enter_context(replaced(owner, "load_state_dict", self._waiting(owner.load_state_dict)))

    def wait(self) -> None:
        """Wait until the state is copied, and let it change."""
        self._pass()
        self._hooks.close()

    @property
    def _is_copying(self) -> bool:
        return self._copies is not None and not self._copies.are_done

    def _pass(self) -> None:
        copies = self._copies
        if copies is None:
            return
        if not copies.are_done:
            with self._measured():
                copies.wait()  # it may be interrupted, in a notebook: the next change waits again
        self._copies = None
        passed, self._passed = self._passed, bool
        passed()

    @contextlib.contextmanager
    def _measured(self) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._waited(time.monotonic() - began)

    def disarm(self) -> None:
        """Let the state change: it is not copied any more."""
        self._copies, self._passed = None, bool
        self._hooks.close()
        self._lasting.close()

    def _before_step(self, optimizer: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        # The hook stays until the next save: torch goes through its hooks now, and none may be removed meanwhile.
        if self._copies is None:
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

    def _one_by_one(self, native: Callable[..., Iterator[tuple[str, Any]]]) -> Callable[..., Iterator[tuple[str, Any]]]:
        from torch.compiler import is_compiling

        def named_parameters(*arguments: Any, **keywords: Any) -> Iterator[tuple[str, Any]]:
            found = native(*arguments, **keywords)
            # Asked first: compiled code then depends on nothing that changes from save to save.
            return found if is_compiling() or not self._is_copying else self._once_copied(found)

        return named_parameters

    def _before_evaluation(self, native: Callable[..., Any]) -> Callable[..., Any]:
        from torch.compiler import is_compiling

        def train(module: Any, mode: bool = True) -> Any:
            if not is_compiling() and not mode and module.training and self._is_copying:
                for _ in module.named_parameters():
                    pass  # each is given out once it is copied
            return native(module, mode)

        return train

    def _once_copied(self, found: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Yield each parameter when it is copied: who wants the type of the first one waits for no other."""
        for name, parameter in found:
            copies, address = self._copies, address_of(parameter)
            if copies is not None and address is not None and copies.is_missing(address):
                with self._measured():
                    copies.wait_for(address)
            yield name, parameter
