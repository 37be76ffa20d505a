"""The steps of all optimizers of a process, for all who ask: one hook of torch."""

from __future__ import annotations

import functools
import itertools
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from resume_adapters.core.observed.optimizers import registered

_told: dict[int, Callable[[Any], object]] = {}
_numbers = itertools.count()
_hooks: list[Any] = []


def watch_steps(tell: Callable[[Any], object]) -> Callable[[], None]:
    """Call a function with each optimizer after each of its steps; return what ends that."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    number = next(_numbers)
    _told[number] = tell
    if not _hooks:
        _hooks.append(register_optimizer_step_post_hook(_after_step))
    return functools.partial(_end, number)


def watch_steps_of(optimizers: Sequence[Any], tell: Callable[[], object]) -> Callable[[], None]:
    """Call a function after each step of one of these, or of one within it; return what ends that.

    One that wraps another may never have called ``Optimizer.__init__()``, without which it takes no hook.
    """
    watched = registered(optimizers)

    def after(optimizer: Any) -> None:
        if any(each is optimizer for each in watched):
            tell()

    return watch_steps(after)


def _after_step(optimizer: Any, *_: Any) -> None:
    for tell in list(_told.values()):
        tell(optimizer)


def _end(number: int) -> None:
    """Remove the hook if nobody else is told; not within a step, where torch goes through its hooks."""
    _told.pop(number, None)
    if _hooks and not _told and not _is_stepping():
        _hooks.pop().remove()


def _is_stepping() -> bool:
    """Return whether an optimizer steps in any thread: objects are also collected in the middle of a step."""
    file = sys.modules["torch.optim.optimizer"].__file__
    calls = itertools.chain(*map(traceback.walk_stack, sys._current_frames().values()))
    return any(frame.f_code.co_filename == file for frame, _ in calls)
