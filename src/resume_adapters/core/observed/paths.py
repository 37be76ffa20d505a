"""Paths through the objects of a training: attributes, items of containers, tensors of modules."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

ABSENT = object()
"""Stands for what is not there."""


class Step(NamedTuple):
    """One step of a path: from an object to what it holds.

    Attributes:
        kind: ``"."`` for an attribute, ``"[]"`` for an item of a container, ``"tensor"`` for a parameter or buffer of a
            module by its name there, ``"requires_grad"`` for whether that parameter is trained, ``"grad"`` for the
            gradient of a tensor.
        key: the name, key or index.
    """

    kind: str
    key: Any


class Path(NamedTuple):
    """Where something is among the objects of a training.

    Attributes:
        root: name of the root.
        steps: how to go there from the root.
    """

    root: str
    steps: tuple[Step, ...] = ()

    def __str__(self) -> str:
        return self.root + "".join(_shown(step) for step in self.steps)

    def to(self, kind: str, key: Any) -> Path:
        """Return the path to something that the object at this path holds."""
        return Path(self.root, (*self.steps, Step(kind, key)))

    @property
    def owner(self) -> Path:
        """The path to the object that holds this."""
        return Path(self.root, self.steps[:-1])

    def is_below(self, other: Path) -> bool:
        """Return whether this path leads through another."""
        return self.root == other.root and self.steps[: len(other.steps)] == other.steps


def path_of(root: str, steps: Iterable[Sequence[Any]]) -> Path:
    """Return a path from what was saved of it: the name of its root, and each step as a pair of kind and key."""
    return Path(root, tuple(Step(*step) for step in steps))


def _shown(step: Step) -> str:
    if step.kind == "[]":
        return f"[{step.key!r}]"
    return f".{step.key}" + (".requires_grad" if step.kind == "requires_grad" else "")


def get(roots: Mapping[str, Any], path: Path) -> Any:
    """Return what is at a path, or :data:`ABSENT`."""
    value = roots.get(path.root, ABSENT)
    for step in path.steps:
        value = ABSENT if value is ABSENT else _follow(value, step)
    return value


def _follow(owner: Any, step: Step) -> Any:
    if step.kind in ("tensor", "requires_grad"):
        held = None
        if is_module(owner):
            held = owner._buffers.get(step.key)
            held = owner._parameters.get(step.key) if held is None else held
        if held is None:
            return ABSENT
        return held if step.kind == "tensor" else bool(held.requires_grad)
    if step.kind == "grad":
        gradient = getattr(owner, "grad", None)
        return ABSENT if gradient is None else gradient
    if step.kind == "[]":
        if isinstance(owner, dict):
            return owner.get(step.key, ABSENT)
        fits = isinstance(owner, list | tuple) and type(step.key) is int and 0 <= step.key < len(owner)
        return owner[step.key] if fits else ABSENT
    if step.key in getattr(owner, "__dict__", {}):
        return vars(owner)[step.key]
    if is_module(owner) and owner._modules.get(step.key) is not None:
        return owner._modules[step.key]
    return getattr(owner, step.key, ABSENT) if step.key in slots(owner) else ABSENT


def slots(owner: Any) -> Iterator[str]:
    """Yield the names of the attributes that an object keeps in ``__slots__``."""
    for kind in type(owner).__mro__:
        names = vars(kind).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if isinstance(vars(kind).get(name), types.MemberDescriptorType):
                yield name


def is_module(value: Any) -> bool:
    """Return whether a value is a ``torch.nn.Module``."""
    return isinstance(value, _module_class())


@functools.cache
def _module_class() -> Any:
    """Return the class: an import takes longer than all else that :func:`is_module` does."""
    import torch

    return torch.nn.Module


def type_name(value: Any) -> str:
    """Return the name of a value's type; ``"absent"`` for :data:`ABSENT`."""
    return "absent" if value is ABSENT else type(value).__name__
