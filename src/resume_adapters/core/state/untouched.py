"""Reads what objects hold without running code of their classes, which may do anything: raise, wait, change them."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterator
from typing import Any

ABSENT = object()
"""Stands for what is not there."""

_CONTAINERS = (dict, list, tuple, set, frozenset, deque)


def is_a(value: Any, *kinds: type) -> bool:
    """Return what ``isinstance`` does, which also asks an object what its class is."""
    return issubclass(type(value), kinds)


def attributes(owner: Any) -> dict[str, Any]:
    """Return the ``__dict__`` of an object; an empty one where it has none."""
    found = _dict_of(owner)
    held: dict[str, Any] = {} if found is None else found.__get__(owner)
    return held


def _dict_of(owner: Any) -> Any:
    found = (vars(kind).get("__dict__") for kind in type(owner).__mro__)
    return next((each for each in found if type(each) in _DESCRIPTORS), None)


_DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType)


def has_attributes(owner: Any) -> bool:
    """Return whether an object has a ``__dict__`` or ``__slots__``."""
    return _dict_of(owner) is not None or any(slots(owner))


def slots(owner: Any) -> Iterator[str]:
    """Yield the names of the attributes that an object keeps in ``__slots__``."""
    for kind in type(owner).__mro__:
        names = vars(kind).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if type(vars(kind).get(name)) is types.MemberDescriptorType:
                yield name


def slot(owner: Any, name: str) -> Any:
    """Return what is in a slot, or :data:`ABSENT`."""
    try:
        return slot_of(owner, name).__get__(owner)
    except AttributeError:
        return ABSENT


def slot_of(owner: Any, name: str) -> Any:
    """Return the descriptor of a slot."""
    found = (vars(kind).get(name) for kind in type(owner).__mro__)
    return next(each for each in found if type(each) is types.MemberDescriptorType)


def container(value: Any) -> Any:
    """Return which container of Python a value is or derives from; ``None`` for any other."""
    return next((kind for kind in _CONTAINERS if issubclass(type(value), kind)), None)


def size(value: Any) -> int:
    """Return the number of items of a container."""
    found: int = container(value).__len__(value)
    return found


def items(value: Any) -> list[Any]:
    """Return the items of a container; of a dict, its keys."""
    return list(container(value).__iter__(value))
