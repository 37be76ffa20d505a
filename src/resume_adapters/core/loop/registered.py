"""Objects that a script registers without a name: known by their class, and by what they hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from resume_adapters.core.log import logger
from resume_adapters.core.state.stateful import Stateful


class RegisteredObjects(Mapping[str, Stateful]):
    """Objects that were registered without names, by names.

    Each has the name of its class; where there are several of a class, they are numbered as they were registered. At
    a resume they are told apart by what stays: shapes of tensors, names, and values that each of them was saved with
    and that one of them has in this launch, too. Those that are alike are paired by their order, which is logged.

    Args:
        objects: the objects. More may come.
    """

    def __init__(self, objects: Sequence[Stateful]) -> None:
        self._objects = objects
        self._names: dict[int, str] = {}

    def __getitem__(self, name: str) -> Stateful:
        return self._named()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._named())

    def __len__(self) -> int:
        return len(self._objects)

    def pair(self, saved: Mapping[str, Any]) -> None:
        """Give each object the name under which its state was saved.

        Args:
            saved: the states, by name.
        """
        for names in _by_class(self._named()):
            if len(names) > 1 and all(name in saved for name in names):
                self._pair(names, saved)

    def _named(self) -> dict[str, Stateful]:
        for each in self._objects:
            kind = type(each).__name__
            same = sum(name.partition(".")[0] == kind for name in self._names.values())
            self._names.setdefault(id(each), f"{kind}.{same}" if same else kind)
        return {self._names[id(each)]: each for each in self._objects}

    def _pair(self, names: list[str], saved: Mapping[str, Any]) -> None:
        objects = [self._named()[name] for name in names]
        before, now = tell_apart([saved[name] for name in names], [each.state_dict() for each in objects])
        kind = type(objects[0]).__name__
        if len(set(before)) < len(before):
            logger.info(
                "%d objects of class %s were registered, and what they hold does not tell all of them apart: those "
                "that are alike get their states in the order in which they were registered. If that has changed, "
                "give them to the run by name: register_for_resume(..., first=..., second=...).",
                len(names),
                kind,
            )
        if before != now:
            logger.info("The registered objects of class %s have another order. Each is known by what it holds.", kind)
        left = list(zip(before, names, strict=True))
        for each, signature in zip(objects, now, strict=True):
            index = next(index for index, (other, _) in enumerate(left) if other == signature)
            self._names[id(each)] = left.pop(index)[1]


def tell_apart(saved: Sequence[Any], live: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return a signature for each of several states that were saved, and for each of as many states now.

    A signature is made of the places at which the saved states differ, and at which the states of now have the same
    values, in any order. The signatures of now are those that were saved, in any order; all are alike where nothing
    tells the states apart, or where what tells them apart does not fit together.
    """
    before, now = [_leaves(each) for each in saved], [_leaves(each) for each in live]
    telling = []
    for place in dict.fromkeys(place for each in before for place in each):
        values = Counter(each.get(place) for each in before)
        if len(values) > 1 and values == Counter(each.get(place) for each in now):
            telling.append(place)
    signatures = [[tuple(each.get(place) for place in telling) for each in states] for states in (before, now)]
    if Counter(signatures[0]) != Counter(signatures[1]):
        return [()] * len(saved), [()] * len(live)
    return signatures[0], signatures[1]


def _by_class(names: Iterable[str]) -> Iterator[list[str]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.partition(".")[0], []).append(name)
    yield from groups.values()


def _leaves(tree: Any) -> dict[str, str]:
    """Return what a state holds by its places: of tensors and arrays the shapes, of anything else what is printed."""
    return dict(_walk("", tree))


def _walk(place: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from _walk(f"{place}/{name}", each)
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from _walk(f"{place}/{index}", each)
    elif hasattr(value, "shape") and hasattr(value, "dtype"):
        yield place, f"{value.dtype} of {tuple(value.shape)}"
    else:
        yield place, repr(value)
