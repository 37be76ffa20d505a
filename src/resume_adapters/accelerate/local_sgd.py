"""The steps that ``LocalSGD`` counts until it averages the weights of all processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from accelerate.local_sgd import LocalSGD

from resume_adapters.core.patching import wrapped


class LocalSteps:
    """Counts and restores the steps of the ``LocalSGD`` that the script has entered.

    Args:
        accelerator: an ``accelerate.Accelerator``; a ``LocalSGD`` of another is left alone.
        entered: is called when the script enters one.
    """

    def __init__(self, accelerator: Any, entered: Callable[[], None]) -> None:
        self._accelerator = accelerator
        self._entered = entered
        self._current: Any = None
        self._resumed: int | None = None
        self._wrapped = contextlib.ExitStack()
        self._wrapped.enter_context(wrapped(LocalSGD, "__enter__", self._enter))
        self._wrapped.enter_context(wrapped(LocalSGD, "__exit__", self._leave))

    @property
    def count(self) -> int | None:
        """The steps of the one that the script is in; ``None`` where it is in none."""
        return None if self._current is None else self._current.num_steps

    def restore(self, count: int | None) -> None:
        """Let the one that the script is in, or enters next, go on with this count; ``None``: with its own."""
        self._resumed = count
        self._continue()

    def _continue(self) -> None:
        if self._current is not None and self._resumed is not None:
            self._current.num_steps, self._resumed = self._resumed, None

    def _enter(self, native: Callable[[Any], Any], local: Any) -> Any:
        entered = native(local)
        if local.enabled and local.accelerator is self._accelerator:
            self._current = local
            self._entered()
            self._continue()
        return entered

    def _leave(self, native: Callable[..., None], local: Any, *error: Any) -> None:
        native(local, *error)
        if self._current is local:
            self._current = None

    def close(self) -> None:
        """Leave ``LocalSGD`` as it was."""
        self._wrapped.close()
