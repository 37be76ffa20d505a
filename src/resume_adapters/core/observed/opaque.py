"""What tells that an object has changed that is not data: how far an iterator is, what a value prints.

It only reads: nothing is taken from an iterator, and no code of the user is run.
"""

from __future__ import annotations

import enum
import gc
import inspect
import operator
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from resume_adapters.core.observed.leaves import is_array
from resume_adapters.core.observed.paths import slots
from resume_adapters.core.state.fingerprint import value_digest

_NUMBERS_AND_TEXT = (bool, int, float, str, bytes)

_ITERATORS = 100
"""Iterators within one another that are looked at, at most."""


def opaque_fingerprint(value: Any, *, sampled_above: int) -> Any:
    """Return what differs once an object has changed; ``None`` where only its attributes can tell.

    Args:
        value: the object.
        sampled_above: bytes of a larger array that are read.
    """
    if isinstance(value, enum.Enum):
        return str(value)
    if is_array(value) or isinstance(value, deque | set | frozenset):  # subclasses; sparse, of text or of objects
        return value_digest(value, sampled_above=sampled_above)
    if is_loader_iterator(value):
        return value._num_yielded  # seam: torch 2.13
    if _has_attributes(value):
        return None
    if isinstance(value, Iterator):
        return value_digest(_progress(value))
    held = _bytes(value)
    return _printed(value) if held is None else value_digest(held, sampled_above=sampled_above)


def is_value(value: Any) -> bool:
    """Return whether what is not data is a value all the same, such as a date: it cannot hold an open file."""
    if is_array(value) or isinstance(value, deque | set | frozenset):
        return True
    is_other = isinstance(value, Iterator | Mapping | list | tuple) or hasattr(value, "close")
    return not is_other and not _has_attributes(value)


def _has_attributes(value: Any) -> bool:
    return hasattr(value, "__dict__") or any(slots(value))


def is_loader_iterator(value: Any) -> bool:
    """Return whether a value is a pass over a ``DataLoader``, whose workers and counters belong to this launch."""
    from torch.utils.data.dataloader import _BaseDataLoaderIter  # seam: torch 2.13

    return isinstance(value, _BaseDataLoaderIter)


def _progress(iterator: Any) -> list[Any]:
    """Return how far an iterator is, from what it and the iterators that it reads from show of themselves."""
    found: list[Any] = []
    waiting, seen = [iterator], {id(iterator)}
    while waiting and len(seen) < _ITERATORS:
        each = waiting.pop()
        if isinstance(each, types.GeneratorType):
            found.append(inspect.getgeneratorstate(each))
        elif isinstance(each, Iterator):
            found += [operator.length_hint(each, -1), _printed(each)]
        for held in gc.get_referents(each):
            if type(held) in _NUMBERS_AND_TEXT:
                found.append(held)
            elif id(held) not in seen and _has_progress(held):
                seen.add(id(held))
                waiting.append(held)
    return found


def _has_progress(value: Any) -> bool:
    """Return whether a value shows how far it is, or holds what does: ``zip`` a tuple, a generator of 3.10 a frame."""
    if isinstance(value, types.GeneratorType | types.FrameType):
        return True
    if type(value) is tuple:
        return len(value) < _ITERATORS
    return isinstance(value, Iterator) and not hasattr(value, "__dict__")


def _bytes(value: Any) -> Any:
    """Return the bytes of an object that shows them, such as an ``array.array``, as an array; ``None`` of another."""
    import numpy as np

    try:
        held = memoryview(value)
    except TypeError:
        return None
    return np.frombuffer(held, dtype=np.uint8) if held.contiguous and held.nbytes else np.zeros(0, dtype=np.uint8)


def _printed(value: Any) -> str | None:
    """Return what an object prints; ``None`` where that is its address, or made by code of the user."""
    if inspect.isfunction(type(value).__repr__):
        return None
    try:
        text = repr(value)
    except Exception:  # of any kind: a library's type may print what it likes
        return None
    return None if "0x" in text else text
