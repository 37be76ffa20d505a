"""Notices a loop that goes past the run: optimizers that step and loaders that are read, uncounted or unsaved.

Optimizers are seen as they step, and loaders through ``DataLoader.__iter__``, whatever the script does
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
from resume_adapters.core.loop.tensors import are_saved
from resume_adapters.core.observed.instances import subclasses
from resume_adapters.core.observed.optimizers import is_within
from resume_adapters.core.observed.steps import watch_steps
from resume_adapters.core.patching import replaced
from resume_adapters.core.state.stateful import parameters_of
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
        self._watching = contextlib.ExitStack()
        self._saved: weakref.WeakSet[Any] = weakref.WeakSet()
        self._first_windows: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self.counted = self.steps = 0
        self._uncounted = 0

    def begin(self) -> None:
        """Watch from now on; called once."""
        self._watching.callback(watch_steps(self._after_step))
        _watch(self)
        self._watching.callback(_unwatch, self)

    def close(self) -> None:
        """Watch no longer."""
        self._watching.close()

    # ---- Uncounted steps

    def end_body(self, steps: int, *, is_counted: bool) -> None:
        """End a body of the outermost loop: in most, a ``run.step`` follows where optimizers have stepped.

        Args:
            steps: what :attr:`steps` was when it began.
            is_counted: a ``run.step`` has followed.

        Raises:
            UnsupportedSetting: there were several without.
        """
        self._uncounted += steps < self.steps and not is_counted
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

    def _after_step(self, optimizer: Any) -> None:
        if optimizer not in self._saved:
            window = self.counted + self._uncounted
            is_first = self._first_windows.setdefault(optimizer, window) == window
            if obstacle := self._obstacle(optimizer):
                if is_first:  # one that lives for a window has no state to save
                    return
                raise UnsupportedSetting(obstacle)
            self._saved.add(optimizer)
        self.steps += 1

    def _obstacle(self, optimizer: Any) -> str:
        """Return why a resume would lose what an optimizer does; nothing if it is saved, with what it trains."""
        trained = self._trained()
        name = type(optimizer).__name__
        saved = [*trained.optimizers, *self._parts.values()]
        is_known = any(each is optimizer for each in saved)
        if not is_known and not is_within(optimizer, saved):
            return (
                f"an optimizer that is not saved has stepped, {name} of {len(parameters_of(optimizer))} tensors: after "
                f"a resume it would start over. Prepare it with its model, or pass it as a part: {self._registers}("
                "..., optimizer=optimizer)"
            )
        if trained.are_partitioned and any(each is optimizer for each in trained.optimizers):
            return ""
        held = set(map(id, are_saved(trained.optimizers)))
        for each in (*trained.modules, *saved):
            with contextlib.suppress(Exception):  # what is no module may have anything of that name
                held |= {id(parameter) for parameter in each.parameters()}
        lost = [each for each in parameters_of(optimizer) if id(each) not in held]
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
        "the optimizer steps, but run.step() is not called after it: no step is counted, and nothing would be saved. "
        "Call it after each batch:\n\n"
        "    for batch in run.batches(loader):\n        ...\n        run.step(loss=loss)\n"
    )


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
