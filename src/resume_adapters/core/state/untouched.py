"""Reads what objects hold without running code of their classes, which may do anything: raise, wait, change them."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import types
from collections import deque
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
    return _dict_of(owner) is not None or bool(slots(owner))


def slots(owner: Any) -> dict[str, Any]:
    """Return the descriptors of the attributes that an object keeps in ``__slots__``, by name."""
    found = {}
    for kind in reversed(type(owner).__mro__):
        names = vars(kind).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if type(vars(kind).get(name)) is types.MemberDescriptorType:
                found[name] = vars(kind)[name]
    return found


def in_slots(owner: Any) -> dict[str, Any]:
    """Return what is in the ``__slots__`` of an object, by name."""
    found = {}
    for name, each in slots(owner).items():
        with contextlib.suppress(AttributeError):  # nothing is there
            found[name] = each.__get__(owner)
    return found


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


def numbers_in(value: Any) -> Any:
    """Return the memory of a number of ``ctypes``, or of an array of them, as an array; ``None`` for anything else."""
    import numpy as np

    if not is_a(value, ctypes.Array, ctypes._SimpleCData):
        return None
    memory = memoryview(value)
    is_numbers = memory.nbytes > 0 and memory.format.strip("<>") in tuple("?bBhHiIlLqQfd")  # and no pointers
    return np.frombuffer(value, np.uint8) if is_numbers else None


HOLDING = (types.FunctionType, types.MethodType, types.BuiltinMethodType, functools.partial)
"""Code that holds something from one call to the next."""


def held_by_code(code: Any) -> dict[str, Any]:
    """Return what code holds: a function's variables of outer ones and defaults, a method's object, arguments."""
    if is_a(code, functools.partial):
        return {"func": code.func, "args": code.args, "keywords": code.keywords}
    if is_a(code, types.FunctionType):
        defaults = {name: getattr(code, name) for name in ("__defaults__", "__kwdefaults__")}
        return {**cells(code), **{name: each for name, each in defaults.items() if each}}
    return {"__self__": code.__self__} if is_a(code, types.MethodType, types.BuiltinMethodType) else {}


def cell_of(code: Any, name: str) -> Any:
    """Return the cell of a variable of an outer function that a function uses; ``None`` where there is none."""
    names = code.__code__.co_freevars if is_a(code, types.FunctionType) else ()
    return code.__closure__[names.index(name)] if name in names else None


def cells(code: Any) -> dict[str, Any]:
    """Return the variables of outer functions that a function uses; none for a class."""
    found = {}
    if is_a(code, types.FunctionType):
        for name, cell in zip(code.__code__.co_freevars, code.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # it has no value yet
                found[name] = cell.cell_contents
    return found
