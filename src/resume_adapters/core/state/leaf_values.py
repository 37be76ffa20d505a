"""How a leaf of a census is captured as data, and restored where it was found."""

from __future__ import annotations

import enum
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any

from resume_adapters.core.state import encoding
from resume_adapters.core.state.object_path import ABSENT, Path, Step, get, slots, type_name
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
