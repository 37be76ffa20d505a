"""Whether the weights are those of the end of a step, or somewhere between two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class UpdateWatch:
    """Sees each optimizer step of the process begin, of optimizers that torch knows.

    Attributes:
        is_updating: one has begun since :meth:`end_step`.
    """

    def __init__(self) -> None:
        self.is_updating = False
        self._handle: Any = None

    def begin(self) -> None:
        """Begin to watch."""
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self._handle = register_optimizer_step_pre_hook(self._before_step)

    def close(self) -> None:
        """Watch no longer."""
        if self._handle is not None:
            self._handle.remove()

    def begin_holding(self) -> None:
        """Nothing is whole until :meth:`end_step`: who is interrupted in between holds parts of two moments."""
        self.is_updating = True

    def end_step(self) -> None:
        """All that follows an update is done."""
        self.is_updating = False

    def _before_step(self, optimizer: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Lightning runs forward and backward in the closure of a step: the update begins when that returns."""
        if callable(keywords.get("closure")):
            return arguments, {**keywords, "closure": self._ending(keywords["closure"])}
        if len(arguments) > 1 and callable(arguments[1]):
            return (arguments[0], self._ending(arguments[1]), *arguments[2:]), keywords
        self.is_updating = True
        return None

    def _ending(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **keywords: Any) -> Any:
            result = closure(*arguments, **keywords)
            self.is_updating = True
            return result

        return run
