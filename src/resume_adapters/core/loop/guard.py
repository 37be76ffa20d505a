"""Notices a loop that goes past the run: optimizers that step and loaders that are read, uncounted or unsaved.

Optimizers are seen through torch's global hooks, and loaders through ``DataLoader.__iter__``, whatever the script does
with them. What the run cannot resume exactly is refused within the first steps, with the lines to change.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from resume_adapters.core.dataloader.instrument import TrackedIterator
from resume_adapters.core.observed.instances import subclasses
from resume_adapters.core.observed.optimizers import is_within
from resume_adapters.core.patching import replaced
from resume_adapters.errors import UnsupportedSetting

_TWICE = 2
"""How often something is seen before it is refused: once may be a trial."""


@dataclass(frozen=True)
class Trained:
    """What a framework saves of a training.

    Attributes:
        optimizers: the optimizers, with those within their wrappers.
        modules: what they train.
        are_partitioned: they step partitions of the weights of the modules, not the weights.
    """

    optimizers: Sequence[Any]
    modules: Sequence[Any]
    are_partitioned: bool = False


class LoopGuard:
    """Watches the optimizers and the loaders of a process while a loop runs.

    Args:
        trained: returns what the framework saves.
        registers: what registers a further part of the state, as a user writes it.
        parts: what the user registered.
        is_given: returns whether a loader was given to the loop.

    Attributes:
        counted: calls of ``run.step``; the loop counts them.
        steps: steps of the optimizers that are saved.
    """

    def __init__(
        self,
        trained: Callable[[], Trained],
        registers: str,
        parts: Mapping[str, Any],
        is_given: Callable[[Any], bool],
    ) -> None:
        self._trained = trained
        self._registers = registers
        self._parts = parts
        self._is_given = is_given
        self._hooks: list[Any] = []
        self._seen: weakref.WeakKeyDictionary[Any, _Optimizer] = weakref.WeakKeyDictionary()
        self._usual: Any = None
        self.counted = self.steps = 0
        self._uncounted = 0

    def begin(self) -> None:
        """Watch from now on; called once."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._hooks.append(register_optimizer_step_post_hook(self._after_step))
        _watch(self)

    def close(self) -> None:
        """Watch no longer."""
        self._usual = None
        while self._hooks:
            self._hooks.pop().remove()
            _unwatch(self)

    # ---- Uncounted steps

    def count_uncounted(self) -> None:
        """Count a body of the outermost loop over batches in which optimizers have stepped, without ``run.step``.

        Raises:
            UnsupportedSetting: there were several.
        """
        self._uncounted += 1
        if self._uncounted == _TWICE:
            raise _uncounted_steps()

    def require_counted(self) -> None:
        """Refuse a loop whose optimizers have stepped while it never called ``run.step``.

        Raises:
            UnsupportedSetting: it is one.
        """
        if self.steps and not self.counted:
            raise _uncounted_steps()

    # ---- Unsaved optimizers

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if optimizer is self._usual:
            self.steps += 1
            return
        seen = self._seen.get(optimizer)
        if seen is None:
            seen = self._seen[optimizer] = _Optimizer(self._obstacle(optimizer))
        if not seen.obstacle:
            self.steps += 1
            self._usual = optimizer  # it is saved, and need not be looked up at its next step
        elif seen.is_new_in(self.counted + self._uncounted):
            seen.obstacle = self._obstacle(optimizer)
            if seen.obstacle:
                raise UnsupportedSetting(seen.obstacle)

    def _obstacle(self, optimizer: Any) -> str:
        """Return why a resume would lose what an optimizer does; nothing if it is saved, with what it trains."""
        trained = self._trained()
        name = type(optimizer).__name__
        saved = [*trained.optimizers, *self._parts.values()]
        is_known = any(each is optimizer for each in saved)
        if not is_known and not is_within(optimizer, saved):
            return (
                f"an optimizer that is not saved has stepped, {name} of {_count(optimizer)} tensors: after a resume it "
                f"would start over. Prepare it with its model, or pass it as a part: {self._registers}(..., "
                "optimizer=optimizer)"
            )
        if trained.are_partitioned and any(each is optimizer for each in trained.optimizers):
            return ""
        modules = [*trained.modules, *(each for each in self._parts.values() if hasattr(each, "parameters"))]
        held = {id(parameter) for module in modules for parameter in module.parameters()}
        lost = [each for each in _parameters(optimizer) if id(each) not in held]
        if not lost:
            return ""
        return (
            f"{name} trains {len(lost)} tensors that belong to no saved model, the first of shape "
            f"{tuple(lost[0].shape)}: after a resume they would start over. Prepare the model, or pass it as a part: "
            f"{self._registers}(..., model=model)"
        )

    # ---- Unwatched loaders

    def watches(self, loader: Any) -> bool:
        """Return whether a loader was not given to the loop."""
        return not self._is_given(loader)

    def read(self, reading: _Reading) -> None:
        """Count a batch of a loader that was not given to the loop.

        Raises:
            UnsupportedSetting: the run trains on its batches.
        """
        import torch

        if not torch.is_grad_enabled():  # an evaluation
            return
        if reading.steps is not None and self.steps > reading.steps:
            reading.windows += 1
        reading.steps = self.steps
        if reading.windows == _TWICE:
            raise UnsupportedSetting(
                "the model trains on a DataLoader that is not read through run.batches(): its position would not be "
                "saved, and a resume would repeat data. Change\n\n"
                "    for batch in loader:\n\nto\n\n    for batch in run.batches(loader):\n\n"
                "Read a loader that is not for training under torch.no_grad()."
            )


@dataclass
class _Optimizer:
    """An optimizer that has stepped.

    Attributes:
        obstacle: why a resume would lose what it does; nothing if it is saved.
        window: the last window in which it stepped; ``None`` before the first.
    """

    obstacle: str
    window: int | None = None

    def is_new_in(self, window: int) -> bool:
        """Return whether it has stepped in an earlier window, too. One that lives for a window has no state to save."""
        before, self.window = self.window, window
        return before is not None and before != window


@dataclass
class _Reading:
    """A pass over a loader that was not given to the loop.

    Attributes:
        steps: optimizer steps when it gave its last batch; ``None`` before its first.
        windows: how often an optimizer has stepped between two of its batches.
    """

    steps: int | None = None
    windows: int = 0


def _uncounted_steps() -> UnsupportedSetting:
    return UnsupportedSetting(
        "the optimizer steps, but run.step() is not called: no step is counted, and nothing would be saved. End the "
        "body of the loop with it:\n\n"
        "    for batch in run.batches(loader):\n        ...\n        run.step(loss=loss)\n"
    )


def _parameters(optimizer: Any) -> Iterator[Any]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _count(optimizer: Any) -> int:
    return sum(1 for _ in _parameters(optimizer))


# ---- The patch, which all guards of a process share

_guards: list[LoopGuard] = []
_patches = contextlib.ExitStack()


def _watch(guard: LoopGuard) -> None:
    from torch.utils.data import DataLoader

    if not _guards:
        for kind in {DataLoader, *subclasses(DataLoader)}:
            if "__iter__" in vars(kind) and not hasattr(kind, "resume_tracked"):
                _patches.enter_context(replaced(kind, "__iter__", _watched(vars(kind)["__iter__"])))
    _guards.append(guard)


def _unwatch(guard: LoopGuard) -> None:
    _guards.remove(guard)
    if not _guards:
        _patches.close()


def _watched(native: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
    @functools.wraps(native)
    def batches(loader: Any) -> Iterator[Any]:
        watching = [guard for guard in _guards if guard.watches(loader)]
        inner = native(loader)
        if not watching:
            return inner
        readings = [(guard, _Reading()) for guard in watching]

        def fetch(inner: Iterator[Any]) -> Any:
            batch = next(inner)
            for guard, reading in readings:
                guard.read(reading)
            return batch

        return TrackedIterator(fetch, inner)

    return batches
