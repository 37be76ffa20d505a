"""Whether the weights are those of the end of a step, or somewhere between two."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

from resume_adapters.core.patching import replaced


class UpdateWatch:
    """Sees each optimizer step of the process begin, of optimizers that torch knows.

    A schedule of torch that moves elsewhere, such as at the end of an epoch, is no update. It is copied before, since
    frameworks save the live one.

    Attributes:
        is_updating: one has begun since :meth:`end_step`.
    """

    def __init__(self) -> None:
        self.is_updating = False
        self._undo = contextlib.ExitStack()
        self._schedules: dict[int, _HeldSchedule] = {}

    def begin(self) -> None:
        """Begin to watch."""
        from torch.amp.grad_scaler import GradScaler
        from torch.optim.lr_scheduler import LRScheduler
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self._undo.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        # seam: torch 2.6-2.13 have no hooks for them
        for base, name, before in (
            (LRScheduler, "step", self._before_schedule),
            (GradScaler, "update", self._before_scaler),
        ):
            for kind in _with_own(base, name):
                self._undo.enter_context(replaced(kind, name, _preceded(vars(kind)[name], before)))

    def close(self) -> None:
        """Watch no longer."""
        self._undo.close()

    def begin_holding(self) -> None:
        """Nothing is whole until :meth:`end_step`: who is interrupted in between holds parts of two moments."""
        self.is_updating = True

    def end_step(self) -> None:
        """All that follows an update is done."""
        self.is_updating = False
        self._schedules.clear()

    def restore_schedules(self) -> None:
        """Let the schedules, and the settings of their optimizers, be what they were at the last :meth:`end_step`."""
        for each in reversed(self._schedules.values()):  # several set the same rate, and one may hold others
            each.restore()

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

    def _before_schedule(self, schedule: Any) -> None:
        if not self.is_updating and id(schedule) not in self._schedules:
            self._schedules[id(schedule)] = _HeldSchedule(schedule)

    def _before_scaler(self, scaler: Any) -> None:
        """It changes its scale also where an overflow has left the optimizer out."""
        self.is_updating = True


class _HeldSchedule:
    """A schedule as it is now, with the settings of its optimizer, of which it sets one.

    Args:
        schedule: the schedule.
    """

    def __init__(self, schedule: Any) -> None:
        self._schedule = schedule
        self._state = copy.deepcopy(schedule.state_dict())
        self._groups = [(group, _settings(group)) for group in schedule.optimizer.param_groups]

    def restore(self) -> None:
        """Let both be that again."""
        self._schedule.load_state_dict(self._state)
        for group, settings in self._groups:
            for name, value in settings.items():
                if hasattr(group[name], "copy_"):  # a learning rate that is a tensor may be part of a captured graph
                    group[name].copy_(value)
                else:
                    group[name] = value


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}


def _with_own(base: type, name: str) -> Iterator[type]:
    """Yield the classes, of one and those derived from it, that define a method of a name."""
    if name in vars(base):
        yield base
    derived: list[type] = base.__subclasses__()
    for each in derived:
        yield from _with_own(each, name)


def _preceded(native: Callable[..., Any], before: Callable[[Any], object]) -> Callable[..., Any]:
    @functools.wraps(native)
    def run(self: Any, *arguments: Any, **keywords: Any) -> Any:
        before(self)
        return native(self, *arguments, **keywords)

    return run
