"""Objects with ``state_dict()`` and ``load_state_dict()``, and wrappers that add both."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeGuard

from resume_adapters.core.state import rng
from resume_adapters.core.state.untouched import attributes
from resume_adapters.errors import StateMismatch, UnsupportedSetting

REGISTERED = "registered"
"""The part of what a script registers without a name."""

TENSORS = "trained_tensors"
"""The part of tensors that are trained and of no module."""

RESERVED = (
    *("architecture", "buffers", "callbacks", "constant_tensors", "held_buffers", "live_weights", "manifest"),
    *("metrics", "observed_tensors", REGISTERED, "scaler", "trackers", TENSORS),
)
"""Names of this package's own parts; a user's parts cannot have them, under any framework."""

_NAME = re.compile(r"[a-z][a-z0-9_]*")


def give_shape(tensor: Any, shape: Sequence[int]) -> None:
    """Give a tensor the shape that training had given it, to be loaded into; also one that has none yet."""
    if hasattr(type(tensor), "materialize"):  # of a lazy module
        tensor.materialize(tuple(shape))
    elif [*tensor.shape] != [*shape]:
        tensor.data = tensor.data.new_zeros(shape)


def fill(tensor: Any, saved: Any) -> None:
    """Give a tensor the saved values, and the shape that training had given it."""
    give_shape(tensor, saved.shape)
    tensor.data.copy_(saved)


class Stateful(Protocol):
    """Anything with ``state_dict()`` and ``load_state_dict()``."""

    def state_dict(self) -> Any:
        """Return the state as data."""

    def load_state_dict(self, state: Any) -> Any:
        """Restore what :meth:`state_dict` returned."""


def is_stateful(thing: Any) -> TypeGuard[Stateful]:
    """Return whether a thing has both methods; of a protocol ``isinstance`` takes ten times as long to say."""
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


def restore_state(thing: Stateful, saved: Any) -> None:
    """Restore what a thing's ``state_dict()`` returned.

    A module may hold one that names its tensors in a way of its own or leaves some out, which torch asks when it saves
    and not when it loads: such a one gets them by the names that they have now.
    """
    import torch

    try:
        thing.load_state_dict(saved)
    except RuntimeError:
        if not isinstance(thing, torch.nn.Module) or _shapes(thing.state_dict()) != _shapes(saved):
            raise
        for name, each in thing.state_dict().items():
            if hasattr(each, "shape"):
                fill(each, saved[name])


def _shapes(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: getattr(each, "shape", None) for name, each in state.items()}


class StaticState:
    """A part whose state is a fixed tree: it is saved, and read where it is needed.

    Args:
        value: the tree.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        """Return the tree."""
        return self.value

    def load_state_dict(self, state: Any) -> None:
        """Replace the tree."""
        self.value = state


class ModuleBuffers:
    """The buffers of modules, as a part. Each rank has its own, and some frameworks save only those of one rank.

    Args:
        modules: the modules, by names that are the same in every launch.
    """

    def __init__(self, modules: Mapping[Any, Any]) -> None:
        self._named = {
            f"{key}.{name}": buffer for key, module in modules.items() for name, buffer in module.named_buffers()
        }

    @property
    def ids(self) -> set[int]:
        """The ids of the buffers."""
        return set(map(id, self._named.values()))

    def state_dict(self) -> dict[str, Any]:
        """Return the buffers, by module and name."""
        return dict(self._named)

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Give the buffers the saved values, and the shapes that training had given them.

        Raises:
            StateMismatch: a buffer was not saved.
        """
        if lost := [name for name in self._named if name not in saved]:
            raise StateMismatch(f"the buffer {lost[0]} was not there at the save: launch as before, or start a new run")
        for name, buffer in self._named.items():
            fill(buffer, saved[name])

    @staticmethod
    def is_state(saved: Any) -> bool:
        """Return whether data has the form of what :meth:`state_dict` returns."""
        import torch

        return isinstance(saved, Mapping) and all(isinstance(each, torch.Tensor) for each in saved.values())


class StatefulGroup:
    """Several Statefuls as one part; each restores the state saved under its name.

    Args:
        named: the objects, by names that are the same in every launch.
        announce: called with what was saved before it is restored.

    Attributes:
        named: those objects.
    """

    def __init__(self, named: Mapping[str, Stateful], announce: Callable[[Mapping[str, Any]], object] = bool) -> None:
        self.named = named
        self._announce = announce

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each, by name."""
        return {name: each.state_dict() for name, each in self.named.items()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore each object whose name was saved."""
        self._announce(saved)
        for name, each in self.named.items():
            if name in saved:
                restore_state(each, saved[name])


def named_parts(parts: dict[str, Any]) -> dict[str, Stateful]:
    """Check the names of the user's parts, and wrap plain generators so that they are Stateful.

    Raises:
        UnsupportedSetting: a name is reserved or cannot be a file name, or an object cannot save its state.
    """
    named: dict[str, Stateful] = {}
    for name, part in parts.items():
        if not _NAME.fullmatch(name) or name in RESERVED:
            raise UnsupportedSetting(
                f"{name!r} cannot name a part: expected lower-case letters, digits and underscores, and none of "
                f"{', '.join(RESERVED)}"
            )
        stateful = rng.GeneratorState(part) if rng.is_generator(part) else part
        if not is_stateful(stateful):
            raise UnsupportedSetting(
                f"{name}={type(part).__name__}(...) has no state_dict() and load_state_dict(), so it cannot be saved: "
                "add both, or wrap it in an object that has them"
            )
        named[name] = stateful
    return named


def is_optimizer(thing: Any) -> bool:
    """Return whether a thing is an optimizer or wraps one; a model may have a method of the same name."""
    import torch

    return not isinstance(thing, torch.nn.Module) and isinstance(getattr(thing, "param_groups", None), list)


def is_schedule(thing: Any) -> bool:
    """Return whether a thing is a schedule of learning rates; a model or an optimizer may have such a method too."""
    import torch

    return not isinstance(thing, torch.nn.Module | torch.optim.Optimizer) and callable(getattr(thing, "get_last_lr", 0))


def uncompiled(model: Any) -> Any:
    """Return the module that ``torch.compile`` has wrapped; a model itself that it has not."""
    held = attributes(model).get("_modules", {})  # of a scripted module, no dict
    return dict(held.items()).get("_orig_mod", model)


def innermost(wrapper: Any, name: str) -> Any:
    """Return what is within wrappers, each of which has the next, or ``None``, under a name."""
    inner = getattr(wrapper, name, wrapper)
    is_held = inner is not wrapper and (inner is None or hasattr(inner, "state_dict"))
    return innermost(inner, name) if is_held else wrapper


def parameters_of(*optimizers: Any) -> list[Any]:
    """Return the parameters that optimizers of torch step, group by group."""
    return [each for one in optimizers for group in one.param_groups for each in group["params"]]
