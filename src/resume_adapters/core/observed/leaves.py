"""How a leaf of a census is captured as data, and restored where it was found."""

from __future__ import annotations

import enum
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any

from resume_adapters.core.observed.paths import ABSENT, Path, Step, get, slots, type_name
from resume_adapters.core.state import encoding
from resume_adapters.core.state.fingerprint import value_digest
from resume_adapters.core.state.rng import GeneratorState, generator_of, is_generator
from resume_adapters.errors import NotSerialisable


class LeafKind(enum.Enum):
    """How a leaf is captured: as data, through its ``state_dict()``, in place in its module, or not at all.

    A module is captured by its tensors, where it is there before the first step of each launch.
    """

    DATA = "data"
    STATEFUL = "stateful"
    TENSOR = "tensor"
    MODULE = "module"
    OPAQUE = "opaque"


def capture(value: Any, kind: LeafKind) -> Any:
    """Return a value as data that can be encoded.

    Raises:
        NotSerialisable: it is not data.
    """
    return encoding.exact(state_of(value) if kind is LeafKind.STATEFUL else value)


def state_of(value: Any) -> Any:
    """Return the ``state_dict()`` of a value, or the state of a random generator.

    Raises:
        NotSerialisable: its ``state_dict()`` failed.
    """
    try:
        return (GeneratorState(value) if is_generator(value) else value).state_dict()
    except Exception as error:  # of any kind: the method is the user's
        raise NotSerialisable(f"the state_dict() of a {type_name(value)} failed: {error}") from error


def can_be_made(type_then: str, saved: Any, kind: LeafKind) -> bool:
    """Return whether :func:`restore` makes what was captured where it is not there yet: a random generator.

    Args:
        type_then: the name of the type that it had.
        saved: what :func:`capture` returned, after decoding.
        kind: how it was captured.
    """
    return kind is LeafKind.STATEFUL and generator_of(type_then, saved) is not None


def restore(
    roots: Mapping[str, Any], path: Path, saved: Any, kind: LeafKind, *, in_place: bool, type_then: str = ""
) -> None:
    """Restore what was captured at a path; containers in place, so that others who hold them see it.

    Args:
        roots: the objects where paths begin.
        path: the path.
        saved: what :func:`capture` returned, after decoding.
        kind: how it was captured.
        in_place: fill a tensor or an array that has the same shape and dtype, too.
        type_then: the name of the type that it had, where what is there now may be of another.
    """
    live = get(roots, path)
    if kind is LeafKind.STATEFUL and type_then not in ("", type_name(live)):
        _assign(get(roots, path.owner), path.steps[-1], generator_of(type_then, saved))
    elif kind is LeafKind.STATEFUL:
        (GeneratorState(live) if is_generator(live) else live).load_state_dict(saved)
    elif kind is LeafKind.TENSOR:
        live.data.copy_(saved)
    elif path.steps[-1].kind == "requires_grad":
        live = get(roots, path.owner.to("tensor", path.steps[-1].key))
        live.requires_grad_(saved)
    else:
        _assign(get(roots, path.owner), path.steps[-1], _filled(live, saved, in_place=in_place))


def remove(roots: Mapping[str, Any], path: Path) -> None:
    """Remove an attribute that was not there before."""
    owner, name = get(roots, path.owner), path.steps[-1].key
    if name in slots(owner):
        delattr(owner, name)
    else:
        del vars(owner)[name]


def _assign(owner: Any, step: Step, value: Any) -> None:
    if step.kind == "[]":
        owner[step.key] = value
    elif step.kind == "grad":
        owner.grad = value
    elif step.key in slots(owner):
        setattr(owner, step.key, value)
    else:
        # As it was read: not through a __setattr__ or a property, which may do more than assign.
        vars(owner)[step.key] = value


def _filled(live: Any, saved: Any, *, in_place: bool = False) -> Any:
    """Return the saved value; in the live object where that is a container of the same type."""
    if type(live) is not type(saved):
        return encoding.require_named(saved)
    if isinstance(saved, dict):
        return _filled_dict(live, saved)
    if isinstance(saved, list):
        live[:] = [_filled(live[at] if at < len(live) else ABSENT, each) for at, each in enumerate(saved)]
        return live
    if isinstance(saved, deque) and live.maxlen == saved.maxlen:
        items = [_filled(live[at] if at < len(live) else ABSENT, each) for at, each in enumerate(saved)]
        live.clear()
        live.extend(items)
        return live
    if isinstance(saved, set):
        live.clear()
        live.update(saved)
        return live
    if in_place and is_array(saved) and live.shape == saved.shape and live.dtype == saved.dtype:
        return _filled_array(live, saved)
    return saved


def _filled_array(live: Any, saved: Any) -> Any:
    import torch

    if isinstance(live, torch.Tensor):
        live.data.copy_(saved)
    else:
        live[...] = saved
    return live


def _filled_dict(live: Any, saved: Any) -> Any:
    if isinstance(saved, defaultdict) and not encoding.has_same_factory(live, saved):
        return encoding.require_named(saved)
    former = dict(live)
    live.clear()
    for key, value in saved.items():
        live[key] = _filled(former.get(key, ABSENT), value)
    return live


def is_array(value: Any) -> bool:
    """Return whether a value is a tensor or a numpy array."""
    import numpy as np
    import torch

    return isinstance(value, torch.Tensor | np.ndarray)


_SMALLEST, _LARGEST = -(2**63), 2**63 - 1
"""Whole numbers that an array can hold."""

_NUMBERS, _KIND = "numbers of a row", "kind"


def is_row(value: Any, longest: int) -> bool:
    """Return whether a value is a list of numbers of one type, or an array or a tensor of one dimension.

    Args:
        value: the value.
        longest: numbers that it has at most.
    """
    import numpy as np
    import torch

    if type(value) is list:
        # A list of anything else, however long, is told by its first item.
        if not 0 < len(value) <= longest or type(value[0]) not in (int, float, np.int64):
            return False
        if len(set(map(type, value))) > 1:
            return False
        return type(value[0]) is float or (min(value) >= _SMALLEST and max(value) <= _LARGEST)
    if isinstance(value, np.ndarray):
        return value.ndim == 1 and 0 < len(value) <= longest and value.dtype.kind in "biuf"
    return isinstance(value, torch.Tensor) and value.ndim == 1 and 0 < len(value) <= longest


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
