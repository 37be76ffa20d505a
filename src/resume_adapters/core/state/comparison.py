"""Compare state dicts and tensors, bit for bit."""

from __future__ import annotations

import dataclasses
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from resume_adapters.errors import NotRestored

if TYPE_CHECKING:
    import torch


_WORD = 8
"""Bytes that are compared at once."""

THREADS = min(os.cpu_count() or 1, 8)
"""Threads that compare: one does not use what the memory can deliver."""

_LARGE = 1 << 24
"""Bytes from which threads gain more than they cost."""


class _Pair(NamedTuple):
    """Two tensors that should be the same, and where."""

    here: str
    saved: torch.Tensor
    live: torch.Tensor


def first_difference(saved: Any, live: Any, where: str = "") -> str | None:
    """Return where two trees first differ and how, or ``None`` if they are equal bit for bit.

    Numbers are compared by value and kind, tensors and arrays by dtype, shape and every byte (so NaN equals NaN).
    """
    found = list(_differences(saved, live, where))
    same = iter(are_same([(each.saved, each.live) for each in found if isinstance(each, _Pair)]))
    for each in found:
        if not isinstance(each, _Pair):
            return each
        if not next(same):
            return f"{each.here}: saved {_describe(each.saved)}, restored {_describe(each.live)}"
    return None


def are_same(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[bool]:
    """Return of each pair of tensors whether it has the same bits."""
    if sum(one.numel() * one.element_size() for one, _ in pairs) < _LARGE:
        return [same_bits(*each) for each in pairs]
    with ThreadPoolExecutor(THREADS, thread_name_prefix="resume-adapters-compare") as pool:
        return list(pool.map(same_bits, *zip(*pairs, strict=True)))


def _differences(saved: Any, live: Any, where: str) -> Iterator[str | _Pair]:
    import numpy as np
    import torch

    here = where.lstrip(".") or "the state"
    if type(saved) is type(live) and hasattr(saved, "__tensor_flatten__"):  # it wraps others: quantized moments
        for name in saved.__tensor_flatten__()[0]:
            yield from _differences(getattr(saved, name), getattr(live, name), f"{where}.{name}")
    elif isinstance(saved, torch.Tensor) and isinstance(live, torch.Tensor):
        yield _Pair(here, saved, live)
    elif isinstance(saved, np.ndarray | np.generic) and isinstance(live, np.ndarray | np.generic):
        if saved.dtype != live.dtype or saved.shape != live.shape or saved.tobytes() != live.tobytes():
            yield f"{here}: saved {_describe(saved)}, restored {_describe(live)}"
    elif isinstance(saved, Mapping) and isinstance(live, Mapping):
        for key in [*saved, *(key for key in live if key not in saved)]:
            if key not in saved or key not in live:
                yield f"{where}.{key}".lstrip(".") + (": not restored" if key in saved else ": was not saved")
            else:
                yield from _differences(saved[key], live[key], f"{where}.{key}")
    elif isinstance(saved, list | tuple | deque) and isinstance(live, list | tuple | deque):
        if len(saved) != len(live):
            yield f"{here}: {len(saved)} items saved, {len(live)} restored"
        for index, (one, other) in enumerate(zip(saved, live, strict=False)):
            yield from _differences(one, other, f"{where}.{index}")
    elif isinstance(saved, float) and isinstance(live, float):
        if saved.hex() != live.hex():
            yield f"{here}: saved {saved!r}, restored {live!r}"
    elif type(saved) is type(live) and _is_known_by_content(saved):
        yield from _differences(vars(saved), vars(live), where)
    elif _kind(saved) != _kind(live) or saved != live:
        yield f"{here}: saved {saved!r}, restored {live!r}"


def _is_known_by_content(value: Any) -> bool:
    """Return whether an object equals no other by itself; one that a script trusts is loaded as another."""
    compares: Any = type(value).__eq__
    is_plain = compares is object.__eq__ or dataclasses.is_dataclass(value)
    return is_plain and hasattr(value, "__dict__") and not hasattr(value, "__qualname__")


def _kind(value: Any) -> type:
    """Return the type to compare by: a subclass counts as its base, a numpy scalar as python's number."""
    import numpy as np

    plain = value.item() if isinstance(value, np.generic) else value
    if isinstance(plain, bytearray):
        return bytes
    return next((kind for kind in (bool, int, float, str) if isinstance(plain, kind)), type(plain))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape and bytes, on any devices."""
    import torch

    if one.dtype != other.dtype or one.shape != other.shape or one.layout != other.layout:
        return False
    if one.layout is torch.sparse_coo:
        pairs = ((one._indices(), other._indices()), (one._values(), other._values()))  # seam: torch 2.6-2.13
        return one.is_coalesced() == other.is_coalesced() and all(same_bits(*each) for each in pairs)
    first, second = bits(one), bits(other)
    if all(each.numel() % _WORD == 0 == each.storage_offset() % _WORD for each in (first, second)):
        first, second = first.view(torch.int64), second.view(torch.int64)  # a word at a time: in a third of the time
    return torch.equal(first, second)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes in element order, on the CPU."""
    import torch

    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # view() checks the stride even of a dimension of size one, where it has no meaning.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def _describe(tensor: Any) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"


def tensors_in(state: Any) -> Iterator[Any]:
    """Yield the tensors in a state."""
    if hasattr(state, "__tensor_flatten__") or hasattr(state, "untyped_storage"):
        yield state
    elif isinstance(state, Mapping | list | tuple | set | deque):
        for each in state.values() if isinstance(state, Mapping) else state:
            yield from tensors_in(each)


def verify_equal(name: str, saved: Any, live: Any) -> None:
    """Compare a saved tree with the live one.

    Raises:
        NotRestored: they differ; the message names the part and the first difference.
    """
    difference = first_difference(saved, live)
    if difference is not None:
        raise NotRestored(
            f"{name} was loaded, but its state is not the saved one; {difference}. Its load_state_dict() drops or "
            "converts state: fix it, or pass verify=False to continue with the difference"
        )
