"""State dict trees as data: to and from safetensors plus JSON, compared bit for bit. Nothing here runs code on load.

A tree is made of dicts, lists, tuples, sets, numbers, strings, bytes, ``None``, torch tensors and numpy arrays.
Tensors, arrays and bytes go into a safetensors file, the rest into JSON, where ``{"$": kind, ...}`` marks what JSON has
no word for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import xxhash

from resume_adapters.errors import NotSerialisable

if TYPE_CHECKING:
    import torch

_SAFE_INTEGER = 1 << 63


def encode(tree: Any) -> tuple[bytes, dict[str, torch.Tensor]]:
    """Split a tree into a JSON document and the tensors it refers to.

    Raises:
        NotSerialisable: naming the place of the first object that is not data.
    """
    tensors: dict[str, torch.Tensor] = {}
    return msgspec.json.encode(_encode(tree, "", tensors)), tensors


def decode(document: bytes, tensors: dict[str, torch.Tensor]) -> Any:
    """Rebuild the tree that :func:`encode` split."""
    return _decode(msgspec.json.decode(document), tensors)


def _encode(value: Any, where: str, tensors: dict[str, torch.Tensor]) -> Any:
    import numpy as np
    import torch

    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, torch.Tensor):
        key = f"{len(tensors)}{where}"
        tensors[key] = _plain(value, where)
        return {"$": "tensor", "key": key}
    if isinstance(value, np.ndarray | np.generic):
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        return {"$": kind, "of": _encode(torch.from_numpy(_numeric(np.array(value, order="C"), where)), where, tensors)}
    if isinstance(value, bytes | bytearray):
        content = torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0, dtype=torch.uint8)
        return {"$": "bytes", "of": _encode(content, where, tensors)}
    if isinstance(value, int):
        return int(value) if -_SAFE_INTEGER <= value < _SAFE_INTEGER else {"$": "int", "of": str(int(value))}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$": "float", "of": repr(float(value))}
    if isinstance(value, Mapping):
        return _encode_dict(value, where, tensors)
    if isinstance(value, list):
        return [_encode(item, f"{where}.{index}", tensors) for index, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"$": "tuple", "of": [_encode(item, f"{where}.{index}", tensors) for index, item in enumerate(value)]}
    if isinstance(value, set | frozenset):
        return {"$": "set", "of": [_encode(item, where, tensors) for item in sorted(value, key=repr)]}
    if isinstance(value, torch.dtype):
        return {"$": "dtype", "of": str(value).removeprefix("torch.")}
    raise NotSerialisable(
        f"{where.lstrip('.') or 'the state'} is a {type(value).__module__}.{type(value).__qualname__}, which a "
        "checkpoint cannot carry without running code when it is loaded: return numbers, strings, tensors, arrays, "
        "lists, tuples or dicts from state_dict()"
    )


def _encode_dict(value: Mapping[Any, Any], where: str, tensors: dict[str, torch.Tensor]) -> Any:
    if all(type(key) is str for key in value) and "$" not in value:
        return {key: _encode(item, f"{where}.{key}", tensors) for key, item in value.items()}
    pairs = [[_encode(key, where, tensors), _encode(item, f"{where}.{key}", tensors)] for key, item in value.items()]
    return {"$": "dict", "of": pairs}


def _plain(tensor: torch.Tensor, where: str) -> torch.Tensor:
    if tensor.is_sparse or tensor.is_quantized:
        raise NotSerialisable(f"{where.lstrip('.') or 'the state'} is a {tensor.layout} tensor; expected a dense one")
    detached = tensor.detach()
    # A storage of its own: safetensors refuses tensors that share one, and a view would carry its whole base along.
    return detached.clone(memory_format=_contiguous()) if _is_view(detached) else detached.contiguous()


def _contiguous() -> Any:
    import torch

    return torch.contiguous_format


def _is_view(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()


def _numeric(array: Any, where: str) -> Any:
    if array.dtype.kind not in "biufc":
        raise NotSerialisable(f"{where.lstrip('.') or 'the state'} is a numpy array of {array.dtype}; expected numbers")
    return array


def _decode(node: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(node, list):
        return [_decode(item, tensors) for item in node]
    if not isinstance(node, dict):
        return node
    if "$" not in node:
        return {key: _decode(item, tensors) for key, item in node.items()}
    kind = node["$"]
    if kind == "tensor":
        return tensors[node["key"]]
    return _DECODERS[kind](node["of"], tensors)


def _decode_dtype(of: Any, tensors: dict[str, torch.Tensor]) -> Any:
    import torch

    dtype = getattr(torch, of)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{of!r} is not a torch dtype")
    return dtype


_DECODERS: dict[str, Any] = {
    "array": lambda of, tensors: _decode(of, tensors).numpy(),
    "scalar": lambda of, tensors: _decode(of, tensors).numpy()[()],
    "bytes": lambda of, tensors: _decode(of, tensors).numpy().tobytes(),
    "int": lambda of, tensors: int(of),
    "float": lambda of, tensors: float(of),
    "dict": lambda of, tensors: {_decode(key, tensors): _decode(item, tensors) for key, item in of},
    "tuple": lambda of, tensors: tuple(_decode(item, tensors) for item in of),
    "set": lambda of, tensors: {_decode(item, tensors) for item in of},
    "dtype": _decode_dtype,
}


def first_difference(saved: Any, live: Any, where: str = "") -> str | None:
    """Return the place of the first difference between two trees, or ``None`` where they agree bit for bit.

    Numbers are compared by value and kind, tensors and arrays by dtype, shape and every byte (so NaN equals NaN).
    """
    return next(_differences(saved, live, where), None)


def _differences(saved: Any, live: Any, where: str) -> Iterator[str]:
    import numpy as np
    import torch

    here = where.lstrip(".") or "the state"
    if isinstance(saved, torch.Tensor) and isinstance(live, torch.Tensor):
        if not same_bits(saved, live):
            yield f"{here}: saved {_describe(saved)}, restored {_describe(live)}"
    elif isinstance(saved, np.ndarray) and isinstance(live, np.ndarray):
        if saved.dtype != live.dtype or saved.shape != live.shape or saved.tobytes() != live.tobytes():
            yield f"{here}: saved and restored arrays differ"
    elif isinstance(saved, dict) and isinstance(live, dict):
        for key in [*saved, *(key for key in live if key not in saved)]:
            if key not in saved or key not in live:
                yield f"{where}.{key}".lstrip(".") + (": not restored" if key in saved else ": was not saved")
            else:
                yield from _differences(saved[key], live[key], f"{where}.{key}")
    elif isinstance(saved, list | tuple) and isinstance(live, list | tuple):
        if len(saved) != len(live):
            yield f"{here}: {len(saved)} items saved, {len(live)} restored"
        for index, (one, other) in enumerate(zip(saved, live, strict=False)):
            yield from _differences(one, other, f"{where}.{index}")
    elif isinstance(saved, float) and isinstance(live, float):
        if saved.hex() != live.hex():
            yield f"{here}: saved {saved!r}, restored {live!r}"
    elif saved != live:
        yield f"{here}: saved {saved!r}, restored {live!r}"


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape and bytes, wherever they are."""
    import torch

    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    first, second = (tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(first, second)


def _describe(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"


def digest(document: bytes, tensors: dict[str, torch.Tensor]) -> str:
    """Return the XXH3-128 digest of an encoded tree."""
    import torch

    hasher = xxhash.xxh3_128(document)
    for tensor in tensors.values():
        hasher.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def digest_of(tree: Any) -> str | None:
    """Return the digest of a tree, or ``None`` where it holds something that is not data."""
    try:
        return digest(*encode(tree))
    except NotSerialisable:
        return None
