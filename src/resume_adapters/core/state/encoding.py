"""State dicts as data: encoded as JSON plus safetensors, decoded without running code, and digested.

A tree consists of dicts, lists, tuples, sets, numbers, strings, bytes, ``None``, torch tensors and numpy arrays.
Tensors, arrays and bytes go into a safetensors file, the rest into JSON. ``{"$": kind, ...}`` stands for a type that
JSON lacks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import xxhash

from resume_adapters.core.state.comparison import bits
from resume_adapters.errors import NotSerialisable

if TYPE_CHECKING:
    import torch

_SAFE_INTEGER = 1 << 63


class Reference(NamedTuple):
    """A tensor of an encoded tree, which is not read: its key in the safetensors file."""

    key: str


def encode(tree: Any) -> tuple[bytes, dict[str, torch.Tensor]]:
    """Split a tree into a JSON document and the tensors it refers to.

    Raises:
        NotSerialisable: the tree holds an object that is not data; the message names its place.
    """
    tensors: dict[str, torch.Tensor] = {}
    document = msgspec.json.encode(_encode(tree, "", tensors))
    return document, _unshared(tensors)


def decode(document: bytes, tensors: dict[str, torch.Tensor]) -> Any:
    """Rebuild the tree that :func:`encode` split.

    Raises:
        ValueError: the document is not what :func:`encode` wrote, or refers to other tensors.
    """
    try:
        return _decode(msgspec.json.decode(document), tensors)
    except _MALFORMED as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


_MALFORMED = (
    *(msgspec.MsgspecError, UnicodeDecodeError, RecursionError),
    *(KeyError, ValueError, TypeError, AttributeError, RuntimeError, OverflowError),
)
"""What decoding a document raises that :func:`encode` did not write, whatever is wrong in it."""


def outline(document: bytes) -> Any:
    """Rebuild the tree that :func:`encode` split, with a :class:`Reference` in place of each tensor, array and bytes.

    Raises:
        ValueError, KeyError: the document is not an encoded tree.
    """
    return _decode(_bare(msgspec.json.decode(document)), _References())


class _References(dict[str, Any]):
    """Has a reference for every key."""

    def __missing__(self, key: str) -> Reference:
        return Reference(key)


def _bare(node: Any) -> Any:
    """Remove what turns a tensor into another type after it was read."""
    if isinstance(node, list):
        return [_bare(item) for item in node]
    if not isinstance(node, dict):
        return node
    if node.get("$") in ("array", "scalar", "bytes", "complex"):
        return _bare(node["of"])
    return {key: _bare(item) for key, item in node.items()}


def _encode(value: Any, where: str, tensors: dict[str, torch.Tensor]) -> Any:
    import numpy as np
    import torch

    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _require_unicode(value, where)
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, where, tensors)
    if isinstance(value, np.ndarray | np.generic):
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        array = _require_numeric(np.array(value, order="C"), where)
        return {"$": kind, "of": _encode(torch.from_numpy(array), where, tensors)}
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
        kind = "set" if isinstance(value, set) else "frozenset"
        return {"$": kind, "of": [_encode(item, where, tensors) for item in sorted(value, key=repr)]}
    if isinstance(value, torch.dtype):
        return {"$": "dtype", "of": str(value).removeprefix("torch.")}
    raise NotSerialisable(
        f"{where.lstrip('.') or 'the state'} is a {type(value).__module__}.{type(value).__qualname__}, which a "
        "checkpoint cannot carry without running code when it is loaded: return numbers, strings, tensors, arrays, "
        "lists, tuples or dicts from state_dict()"
    )


def _encode_dict(value: Mapping[Any, Any], where: str, tensors: dict[str, torch.Tensor]) -> Any:
    if all(type(key) is str for key in value) and "$" not in value:
        return {_require_unicode(key, where): _encode(item, f"{where}.{key}", tensors) for key, item in value.items()}
    pairs = [[_encode(key, where, tensors), _encode(item, f"{where}.{key}", tensors)] for key, item in value.items()]
    return {"$": "dict", "of": pairs}


def _require_unicode(value: str, where: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise NotSerialisable(
            f"{where.lstrip('.') or 'the state'} has the text {value!r}, which is not Unicode: {error.reason}"
        ) from error
    return str(value)


def _encode_tensor(value: torch.Tensor, where: str, tensors: dict[str, torch.Tensor]) -> Any:
    import torch

    if value.layout is not torch.strided or value.is_quantized or value.is_meta:
        raise NotSerialisable(
            f"{where.lstrip('.') or 'the state'} is a {value.dtype} tensor of layout {value.layout} on {value.device}; "
            "expected a dense tensor with data"
        )
    plain = value.detach().resolve_conj().resolve_neg().contiguous()
    if plain.dtype in (torch.complex128, torch.complex32):  # safetensors lacks these two types
        parts = _encode_tensor(torch.view_as_real(plain), where, tensors)
        return {"$": "complex", "of": parts}
    key = f"{len(tensors)}{where}"
    tensors[key] = plain
    return {"$": "tensor", "key": key}


def _unshared(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Clone tensors that share a storage, which safetensors refuses, and views, whose whole base would be written."""
    seen: set[int] = set()
    unshared = {}
    for key, tensor in tensors.items():
        storage = tensor.untyped_storage()
        whole = storage.nbytes() == tensor.numel() * tensor.element_size()
        unshared[key] = tensor if whole and storage.data_ptr() not in seen else tensor.clone()
        seen.add(storage.data_ptr())
    return unshared


def _require_numeric(array: Any, where: str) -> Any:
    dtype = array.dtype
    if dtype.kind not in "biufc" or not dtype.isnative or dtype.itemsize > (16 if dtype.kind == "c" else 8):
        raise NotSerialisable(
            f"{where.lstrip('.') or 'the state'} is a numpy array of {dtype}; expected numbers of at most 64 bits, in "
            "the machine's byte order"
        )
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

    # vars(), not getattr(): torch imports submodules on attribute access, and the name comes from a file.
    dtype = vars(torch).get(of)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{of!r} is not a torch dtype")
    return dtype


def _decode_complex(of: Any, tensors: dict[str, torch.Tensor]) -> Any:
    import torch

    return torch.view_as_complex(_decode(of, tensors))


_DECODERS: dict[str, Any] = {
    "array": lambda of, tensors: _decode(of, tensors).numpy(),
    "scalar": lambda of, tensors: _decode(of, tensors).numpy()[()],
    "bytes": lambda of, tensors: _decode(of, tensors).numpy().tobytes(),
    "int": lambda of, tensors: int(of),
    "float": lambda of, tensors: float(of),
    "dict": lambda of, tensors: {_decode(key, tensors): _decode(item, tensors) for key, item in of},
    "tuple": lambda of, tensors: tuple(_decode(item, tensors) for item in of),
    "set": lambda of, tensors: {_decode(item, tensors) for item in of},
    "frozenset": lambda of, tensors: frozenset(_decode(item, tensors) for item in of),
    "complex": _decode_complex,
    "dtype": _decode_dtype,
}


def digest(document: bytes, tensors: dict[str, torch.Tensor]) -> str:
    """Return the XXH3-128 digest of an encoded tree."""
    hasher = xxhash.xxh3_128(document)
    for tensor in tensors.values():
        hasher.update(bits(tensor).numpy().data)
    return hasher.hexdigest()


def digest_of(tree: Any) -> str | None:
    """Return the digest of a tree, or ``None`` if it holds an object that is not data."""
    try:
        return digest(*encode(tree))
    except NotSerialisable:
        return None
