"""Paths through the objects of a training: attributes, items of containers, tensors of modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple

from resume_adapters.core.state.untouched import (
    ABSENT,
    attributes,
    cell_of,
    container,
    held_by_code,
    in_slots,
    is_a,
    numbers_in,
    size,
)


class Step(NamedTuple):
    """One step of a path: from an object to what it holds.

    Attributes:
        kind: ``"."`` for an attribute, ``"[]"`` for an item of a container, ``"held"`` for what code holds, such as a
            variable of an outer function, ``"tensor"`` for a parameter or buffer of a module by its name there,
            ``"requires_grad"`` for whether that parameter is trained, ``"grad"`` for the gradient of a tensor,
            ``"mode"`` for whether a module in it is in the same mode of training, ``"memory"`` for the numbers of an
            object of ``ctypes``.
        key: the name, key or index; of memory, how many bytes it has.
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
    if step.kind == "memory":
        return ""
    if step.kind == "[]":
        return f"[{step.key!r}]"
    return f".{step.key}" + {"requires_grad": ".requires_grad", "mode": ".training"}.get(step.kind, "")


def get(roots: Mapping[str, Any], path: Path) -> Any:
    """Return what is at a path, or :data:`ABSENT`."""
    value = roots.get(path.root, ABSENT)
    for step in path.steps:
        value = ABSENT if value is ABSENT else _follow(value, step)
    return value


def _follow(owner: Any, step: Step) -> Any:
    if step.kind in ("tensor", "requires_grad"):
        held = tensors_of(owner).get(step.key) if is_module(owner) else None
        if held is None:
            return ABSENT
        return held if step.kind == "tensor" else bool(held.requires_grad)
    if step.kind == "mode":
        child = inside(owner, "_modules").get(step.key) if is_module(owner) else None
        return ABSENT if child is None else attributes(child).get("training") == attributes(owner).get("training")
    if step.kind == "held":
        return held_by_code(owner).get(step.key, ABSENT)
    if step.kind == "memory":
        numbers = numbers_in(owner)
        return ABSENT if numbers is None or len(numbers) != step.key else numbers
    if step.kind == "grad":
        gradient = getattr(owner, "grad", None)
        return ABSENT if gradient is None else gradient
    if step.kind == "[]":
        kind = container(owner)
        if kind is dict:
            return dict.get(owner, step.key, ABSENT)
        fits = kind in (list, tuple) and type(step.key) is int and 0 <= step.key < size(owner)
        return kind.__getitem__(owner, step.key) if fits else ABSENT
    held = attributes(owner)
    if step.key in held:
        return held[step.key]
    if is_module(owner) and (child := inside(owner, "_modules").get(step.key)) is not None:
        return child
    return in_slots(owner).get(step.key, ABSENT)


def within_code(roots: Mapping[str, Any], found: Iterable[Path]) -> Iterator[Any]:
    """Yield what code holds that is at some paths, objects there that lead to it, cells, and dicts of functions."""
    for path in found:
        kinds, owner = [step.kind for step in path.steps], get(roots, path.owner)
        first = kinds.index("held") + 1 if "held" in kinds else len(kinds) + 1
        yield from (get(roots, Path(path.root, path.steps[:count])) for count in range(first, len(kinds) + 1))
        if is_a(owner, FunctionType):
            yield cell_of(owner, path.steps[-1].key) if kinds[-1] == "held" else attributes(owner)


def is_module(value: Any) -> bool:
    """Return whether a value is a ``torch.nn.Module``."""
    import torch

    return issubclass(type(value), torch.nn.Module)


def tensors_of(module: Any) -> dict[str, Any]:
    """Return the parameters and buffers of a module itself, by name."""
    found = {**inside(module, "_parameters"), **inside(module, "_buffers")}
    return {name: each for name, each in found.items() if each is not None}


def inside(module: Any, kind: str) -> dict[str, Any]:
    """Return what a module holds of ``_modules``, ``_parameters`` or ``_buffers``; a scripted one has no dicts."""
    return dict(attributes(module).get(kind, {}).items())


def submodules(module: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield a module and all in it, once each, with the names that lead there."""
    waiting: list[tuple[tuple[str, ...], Any]] = [((), module)]
    seen: set[int] = set()
    while waiting:
        names, each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield names, each
        inner = inside(each, "_modules")
        waiting += [((*names, name), inner[name]) for name in reversed(inner)]


def type_name(value: Any) -> str:
    """Return the name of a value's type; ``"absent"`` for :data:`ABSENT`."""
    return "absent" if value is ABSENT else type(value).__name__
