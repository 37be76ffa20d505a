"""Whether the weights are those of the end of a step, or somewhere between two."""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from resume_adapters.core.patching import replaced
from resume_adapters.core.ranks import Ranks
from resume_adapters.core.state.loading import load_verified
from resume_adapters.core.state.stateful import parameters_of


class UpdateWatch:
    """Sees each optimizer step of the process begin, of optimizers that torch knows.

    A schedule of torch that moves elsewhere, such as at the end of an epoch, is no update. It is copied before, since
    frameworks save the live one.

    """

    def __init__(self) -> None:
        self._has_begun = False
        self._before_hooks: list[tuple[Any, int]] = []
        self._undo = contextlib.ExitStack()
        self._schedules: dict[int, HeldSchedule] = {}
        self._moving: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
        """The optimizers, schedules and scalers that have made a step, in the order of their first."""
        self._last_hooks: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

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
        self.end_step()
        for each in self._last_hooks.values():
            each.remove()
        self._undo.close()

    @property
    def is_updating(self) -> bool:
        """Whether an update has begun since :meth:`end_step`, or a hook before one has changed weights."""
        return self._has_begun or any(weight._version != version for weight, version in self._before_hooks)

    def begin_holding(self) -> list[HeldSchedule]:
        """Nothing is whole until :meth:`end_step`: who is interrupted in between holds parts of two moments.

        Returns:
            The schedules that have moved since the last :meth:`end_step`, as they were then.
        """
        self._has_begun = True
        self._before_hooks.clear()
        moved, self._schedules = self._schedules, {}
        return list(moved.values())

    def end_step(self) -> None:
        """All that follows an update is done."""
        self.begin_holding()
        self._has_begun = False

    def restore_schedules(self, earlier: Sequence[HeldSchedule] = ()) -> None:
        """Restore the schedules, and the settings of their optimizers, of the last :meth:`end_step`.

        Args:
            earlier: what :meth:`begin_holding` has returned since an earlier one, to restore those of then.
        """
        for each in reversed([*earlier, *self._schedules.values()]):  # several set one rate, and one may hold others
            each.restore()

    def take_from(self, source: int, ranks: Ranks, models: Iterable[Any]) -> None:
        """Load the weights of one rank, and all that moves with them, on every rank. All call it.

        Raises:
            ValueError: not as many optimizers, schedules and scalers have made a step on all ranks.
            NotRestored: one takes the state otherwise.
        """
        found = [*models, *self._moving]
        mine = _on_host([each.state_dict() for each in found]) if ranks.rank == source else []
        states = ranks.broadcast(mine, source)
        for each, state in zip(found, states, strict=True):
            if ranks.rank != source:
                load_verified(type(each).__name__, each, state)

    def _before_step(self, optimizer: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Lightning runs forward and backward in the closure of a step: the update begins when that returns."""
        self._moving[optimizer] = None
        if callable(keywords.get("closure")):
            return arguments, {**keywords, "closure": self._ending(keywords["closure"])}
        if len(arguments) > 1 and callable(arguments[1]):
            return (arguments[0], self._ending(arguments[1]), *arguments[2:]), keywords
        if optimizer in self._last_hooks:
            self._last_hooks.pop(optimizer).remove()
        if optimizer._optimizer_step_pre_hooks and not self._has_begun:  # seam: torch 2.6-2.13
            self._before_hooks += [(each, each._version) for each in parameters_of(optimizer)]
            self._last_hooks[optimizer] = optimizer.register_step_pre_hook(self._begin)
        else:
            self._has_begun = True
        return None

    def _begin(self, *_: Any) -> None:
        self._has_begun = True

    def _ending(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **keywords: Any) -> Any:
            result = closure(*arguments, **keywords)
            self._has_begun = True
            return result

        return run

    def _before_schedule(self, schedule: Any) -> None:
        self._moving[schedule] = None
        if not self._has_begun and id(schedule) not in self._schedules:
            self._schedules[id(schedule)] = HeldSchedule(schedule)

    def _before_scaler(self, scaler: Any) -> None:
        """It changes its scale also where an overflow has left the optimizer out."""
        self._moving[scaler] = None
        self._has_begun = True


class HeldSchedule:
    """A schedule as it is now, with the settings of its optimizer, of which it sets one."""

    def __init__(self, schedule: Any) -> None:
        self._schedule = schedule
        self._state = copy.deepcopy(schedule.state_dict())
        self._groups = [(group, _settings(group)) for group in schedule.optimizer.param_groups]

    def restore(self) -> None:
        """Restore both."""
        self._schedule.load_state_dict(self._state)
        for group, settings in self._groups:
            for name, value in settings.items():
                if hasattr(group[name], "copy_"):  # a learning rate that is a tensor may be part of a captured graph
                    group[name].copy_(value)
                else:
                    group[name] = value


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}


def _on_host(tree: Any) -> Any:
    """Copy the tensors of a tree to the host: another rank would read them onto this rank's device."""
    if hasattr(tree, "_version"):
        return tree.detach().cpu()
    if isinstance(tree, Mapping):
        return {name: _on_host(each) for name, each in tree.items()}
    return type(tree)(map(_on_host, tree)) if type(tree) in (list, tuple) else tree


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
