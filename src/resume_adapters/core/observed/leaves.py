"""How a leaf of a census is captured as data, and restored where it was found."""

from __future__ import annotations

import ctypes
import enum
import mmap
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping
from typing import Any

from resume_adapters.core.observed.paths import Path, Step, get, is_module, submodules, type_name
from resume_adapters.core.state import encoding
from resume_adapters.core.state.fingerprint import value_digest
from resume_adapters.core.state.rng import GeneratorState, generator_of, is_generator
from resume_adapters.core.state.stateful import fill
from resume_adapters.core.state.untouched import (
    ABSENT,
    attributes,
    cell_of,
    has_attributes,
    is_a,
    items,
    numbers_in,
    slots,
)
from resume_adapters.errors import NotSerialisable


class LeafKind(enum.Enum):
    """How a leaf is captured: as data, through its ``state_dict()``, in place in its module, or not at all.

    An instance is a member of an enumeration or a named tuple, captured as data and made by the class of what is there.
    A module is captured by its tensors, where it is there before the first step of each launch. Code is a function, a
    class, or a module for its class: which of them a training has chosen is named, where it is another than at first.
    """

    DATA = "data"
    INSTANCE = "instance"
    STATEFUL = "stateful"
    TENSOR = "tensor"
    MODULE = "module"
    CODE = "code"
    OPAQUE = "opaque"


def capture(value: Any, kind: LeafKind) -> Any:
    """Return a value as data that can be encoded.

    Raises:
        NotSerialisable: it is not data.
    """
    read: Any = {LeafKind.STATEFUL: state_of, LeafKind.INSTANCE: data_of_instance}.get(kind, lambda data: data)
    try:
        return encoding.exact(read(value))
    except (RuntimeError, ValueError) as error:  # a tensor that is not initialised yet
        raise NotSerialisable(f"a {type_name(value)} cannot be read: {error}") from error


def state_of(value: Any) -> Any:
    """Return the ``state_dict()`` of a value, or the state of a random generator.

    Raises:
        NotSerialisable: its ``state_dict()`` failed.
    """
    try:
        return (GeneratorState(value) if is_generator(value) else value).state_dict()
    except Exception as error:  # of any kind: the method is the user's
        raise NotSerialisable(f"the state_dict() of a {type_name(value)} failed: {error}") from error


def is_instance(value: Any) -> bool:
    """Return whether a value is told by its class and by data: a member of an enumeration, a named tuple, a shape."""
    import torch

    if is_a(value, enum.Enum):
        return attributes(value).get("_name_") in type(value).__members__
    kind: Any = type(value)
    return is_a(value, tuple) and not has_attributes(value) and (kind is torch.Size or hasattr(kind, "_fields"))


def data_of_instance(value: Any) -> Any:
    """Return the data of a value of which :func:`is_instance` is true: a name, or a tuple.

    Raises:
        NotSerialisable: it is not true.
    """
    if not is_instance(value):
        raise NotSerialisable(f"a {type_name(value)} is neither a member of an enumeration nor a named tuple")
    return attributes(value)["_name_"] if is_a(value, enum.Enum) else tuple(items(value))


def _instance(live: Any, data: Any) -> Any:
    """Return an instance of the class of what is there; a shape, which can be made, where it is of no such class."""
    import torch

    kind: Any = type(live)
    if is_a(live, enum.Enum):
        return kind.__members__[data]
    return tuple.__new__(kind, data) if hasattr(kind, "_fields") else torch.Size(data)


def can_be_made(type_then: str, saved: Any, kind: LeafKind) -> bool:
    """Return whether :func:`restore` makes what was captured where it is not there yet: a buffer, a generator, a shape.

    Args:
        type_then: the name of the type that it had.
        saved: what :func:`capture` returned, after decoding.
        kind: how it was captured.
    """
    if kind is LeafKind.TENSOR:
        return type_then == "Tensor"
    if kind is LeafKind.INSTANCE:
        return type_then == "Size"
    return kind is LeafKind.STATEFUL and generator_of(type_then, saved) is not None


def restore(
    roots: Mapping[str, Any], path: Path, saved: Any, kind: LeafKind, *, in_place: bool, stays: set[int], type_then: str
) -> None:
    """Restore what was captured at a path, into the objects that are there, so that others who hold them see it.

    Args:
        roots: the objects where paths begin.
        saved: what :func:`capture` returned, after decoding.
        kind: how it was captured.
        in_place: training fills its arrays. One that it replaced is filled, too, unless others need what is there.
        stays: where memory begins that others need, by :func:`memory_of`; that of what is restored is added.
        type_then: the name of the type that it had, where what is there now may be of another.
    """
    live = get(roots, path)
    if kind is LeafKind.STATEFUL and type_then != type_name(live):
        _assign(get(roots, path.owner), path.steps[-1], generator_of(type_then, saved))
    elif kind is LeafKind.INSTANCE:
        _assign(get(roots, path.owner), path.steps[-1], _instance(live, saved))
    elif kind is LeafKind.STATEFUL:
        (GeneratorState(live) if is_generator(live) else live).load_state_dict(saved)
    elif live is ABSENT and kind is LeafKind.TENSOR:  # a buffer that the first forward makes, where it finds none
        beside = roots[path.root].parameters() if is_module(roots[path.root]) else ()
        made = next((saved.to(each.device) for each in beside), saved)
        get(roots, path.owner).register_buffer(path.steps[-1].key, made, persistent=False)
    elif kind is LeafKind.TENSOR:
        fill(live, saved)
    elif path.steps[-1].kind == "mode":
        for _, each in submodules(get(roots, path.owner.to(".", path.steps[-1].key))) if live != saved else ():
            attributes(each)["training"] = not attributes(each)["training"]
    elif path.steps[-1].kind == "requires_grad":
        live = get(roots, path.owner.to("tensor", path.steps[-1].key))
        live.requires_grad_(saved)
    else:
        _assign(get(roots, path.owner), path.steps[-1], _Filling(stays, in_place=in_place).filled(live, saved))


def remove(roots: Mapping[str, Any], path: Path) -> None:
    """Remove an attribute that was not there before."""
    owner, name = get(roots, path.owner), path.steps[-1].key
    if name in slots(owner):
        slots(owner)[name].__delete__(owner)
    else:
        del attributes(owner)[name]


def can_be_assigned(owner: Any, step: Step, value: Any) -> bool:
    """Return whether :func:`restore` can restore a value there: in its place, or as it is if it is a dict or a list."""
    if is_a(owner, tuple):
        return False
    return step.kind != "held" or is_a(owner, types.FunctionType) or is_a(value, dict, list)


def _assign(owner: Any, step: Step, value: Any) -> None:
    # As it was read: not through a __setitem__, a __setattr__ or a property, which may do more than assign.
    if step.kind == "[]":
        kind: Any = next(kind for kind in (OrderedDict, dict, list) if is_a(owner, kind))
        kind.__setitem__(owner, step.key, value)
    elif step.kind == "grad":
        owner.grad = value
    elif step.kind == "held":
        if (cell := cell_of(owner, step.key)) is not None:
            cell.cell_contents = value
        elif is_a(owner, types.FunctionType):
            setattr(owner, step.key, value)  # its defaults
    elif step.kind == "memory":
        numbers_in(owner)[...] = value
    elif step.key in slots(owner):
        slots(owner)[step.key].__set__(owner, value)
    else:
        attributes(owner)[step.key] = value


class _Filling:
    """Fills what was saved into what is there."""

    def __init__(self, stays: set[int], *, in_place: bool) -> None:
        self._stays = stays
        self._in_place = in_place

    def filled(self, live: Any, saved: Any) -> Any:
        """Return the saved value; in the live object where that is a container or an array of the same type."""
        if is_array(live) and is_array(saved):
            return self._array(live, saved)
        if type(live) is not type(saved):
            return encoding.require_named(saved)
        if isinstance(saved, dict):
            return self._dict(live, saved)
        if isinstance(saved, list | tuple | deque):
            made = [self.filled(live[at] if at < len(live) else ABSENT, each) for at, each in enumerate(saved)]
            if isinstance(saved, list):
                live[:] = made
            elif isinstance(saved, tuple) or live.maxlen != saved.maxlen:
                return tuple(made) if isinstance(saved, tuple) else deque(made, saved.maxlen)
            else:
                live.clear()
                live.extend(made)
            return live
        if isinstance(saved, set):
            live.clear()
            live.update(saved)
            return live
        return saved

    def _dict(self, live: Any, saved: Any) -> Any:
        if isinstance(saved, defaultdict) and encoding.factory_name(live) != encoding.factory_name(saved):
            return encoding.require_named(saved)
        former = dict(live)
        live.clear()
        for key, value in saved.items():
            live[key] = self.filled(former.get(key, ABSENT), value)
        return live

    def _array(self, live: Any, saved: Any) -> Any:
        memory = memory_of(live)
        if (live.shape, live.dtype) != (saved.shape, saved.dtype):
            return saved
        if memory in self._stays and not self._in_place:
            plain = live.detach() if hasattr(live, "detach") else live
            return live if value_digest(plain) == value_digest(saved) else saved
        try:
            if hasattr(live, "data_ptr"):
                live.data.copy_(saved)
            else:
                live[...] = saved
        except (RuntimeError, ValueError):  # an array that is read-only, a tensor whose elements share memory
            return saved
        if memory:
            self._stays.add(memory)
        return live


def memory_of(array: Any) -> int:
    """Return where the memory begins that a tensor or an array shares with its views; 0 where it has none."""
    import numpy as np

    while is_a(array, np.ndarray) and is_a(array.base, np.ndarray):
        array = array.base
    try:
        return int(array.ctypes.data if is_a(array, np.ndarray) else array.untyped_storage().data_ptr())
    except (NotImplementedError, RuntimeError, ValueError):  # sparse, or not initialised
        return 0


def is_shared(array: Any) -> bool:
    """Return whether a tensor or an array is in memory that processes share, or in a file."""
    import numpy as np

    while is_a(array, np.ndarray):
        if array.base is None:
            return False
        array = array.base
    if is_array(array):
        return memory_of(array) > 0 and bool(array.is_shared())
    return is_a(array, memoryview, mmap.mmap, ctypes.Array)


def is_array(value: Any) -> bool:
    """Return whether a value is a tensor or a numpy array."""
    import numpy as np
    import torch

    return is_a(value, torch.Tensor, np.ndarray)


_SMALLEST, _LARGEST = -(2**63), 2**63 - 1
"""Whole numbers that an array can hold."""

_NUMBERS, _KIND = "numbers of a row", "kind"


def is_row(value: Any, longest: int) -> bool:
    """Return whether a value is a list of numbers of one type, or an array or a tensor of one dimension.

    Args:
        longest: numbers that it has at most.
    """
    import numpy as np
    import torch

    if type(value) is list:
        # A list of anything else, however long, is told by its first item.
        fits = 0 < len(value) <= longest
        if not fits or type(value[0]) not in (int, float, np.int64) or len(set(map(type, value))) > 1:
            return False
        return type(value[0]) is float or (min(value) >= _SMALLEST and max(value) <= _LARGEST)
    if type(value) in (np.ndarray, np.memmap):
        return value.ndim == 1 and 0 < len(value) <= longest and value.dtype.kind in "biuf"
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.ndim == 1 and 0 < len(value) <= longest


def row_digest(row: Any) -> str:
    """Return a digest of all numbers of a row."""
    return value_digest(packed(row) if type(row) is list else row)


def packed(row: list[Any]) -> dict[str, Any]:
    """Return a list that is a row as data which is encoded at once, not number by number."""
    import numpy as np

    kind = type(row[0])
    return {_NUMBERS: np.array(row, dtype=np.float64 if kind is float else np.int64), _KIND: kind.__name__}


def is_packed(saved: Any) -> bool:
    """Return whether data are a list that was packed."""
    return isinstance(saved, dict) and saved.keys() == {_NUMBERS, _KIND}


def unpacked(saved: dict[str, Any]) -> list[Any]:
    """Return the list that was packed."""
    numbers = saved[_NUMBERS]
    return list(numbers) if saved[_KIND] == "int64" else list(numbers.tolist())
