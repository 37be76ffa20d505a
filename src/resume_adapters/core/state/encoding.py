"""State dicts as data: encoded as JSON plus safetensors, decoded without running code, and digested.

A tree consists of dicts, lists, tuples, sets, numbers, strings, bytes, ``None``, torch tensors and numpy arrays.
Tensors, arrays and bytes go into a safetensors file, the rest into JSON. ``{"$": kind, ...}`` stands for a type that
JSON lacks. A subclass of a dict comes back as a dict, unless :func:`exact` or :func:`with_types` has marked it.
"""

from __future__ import annotations

import copy
import functools
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import xxhash

from resume_adapters.core import devices
from resume_adapters.core.log import logger
from resume_adapters.core.state.comparison import bits
from resume_adapters.errors import NotSerialisable

if TYPE_CHECKING:
    import torch

_SAFE_INTEGER = 1 << 63

_FACTORIES: dict[str, Any] = {kind.__name__: kind for kind in (bool, dict, float, int, list, set, str, tuple)}
"""What a ``defaultdict`` may make: a checkpoint names it, and nothing else can be named."""


class _Marked(NamedTuple):
    """A value whose type is encoded: the ``kind`` of a decoder, and what it decodes."""

    kind: str
    of: Any


def exact(value: Any) -> Any:
    """Return a copy of a tree that comes back with the same types: deques, Counters, devices of tensors.

    Raises:
        NotSerialisable: the tree holds an object of a type that would come back as a different one.
    """
    import torch

    kind = type(value)
    if kind is str:
        return _require_unicode(value, "")
    if value is None or kind in _PLAIN:
        return value
    if kind is list:  # one that grows with the steps is copied at each of them: in a sweep, where it has numbers alone
        return value.copy() if _PLAIN.issuperset(map(type, value)) else [exact(item) for item in value]
    if kind is tuple:
        return tuple([exact(item) for item in value])
    if kind in (set, frozenset):
        return kind([exact(item) for item in value])
    if kind is dict:
        return {exact(key): exact(item) for key, item in value.items()}
    if kind in _TYPED:
        return _typed(value, exact)
    if kind in (torch.Tensor, torch.nn.Parameter):
        plain = _require_dense(value, "").detach()
        return plain if plain.device.type == "cpu" else _Marked("device", [plain.device.type, plain])
    if is_numeric(value) or kind in (torch.dtype, _Marked):
        return value
    raise NotSerialisable(f"a {kind.__module__}.{kind.__qualname__} is not data")


_PLAIN = frozenset((bool, int, float, bytes))


_TYPED = frozenset((Counter, OrderedDict, defaultdict, deque))


def _typed(value: Any, copy: Callable[[Any], Any]) -> _Marked:
    """Return a container of the standard library that comes back with its type, and a copy of each item."""
    kind = type(value)
    if kind is deque:
        return _Marked("deque", [value.maxlen, [copy(item) for item in value]])
    pairs = [[copy(key), copy(item)] for key, item in value.items()]
    return _Marked(kind.__name__, [factory_name(value), pairs] if kind is defaultdict else pairs)


def with_types(value: Any, where: str) -> Any:
    """Return a copy of a tree whose containers of the standard library come back as what they are.

    Which others come back as plain ones is logged, once: subclasses, and a ``defaultdict`` of a function.

    Args:
        value: the tree.
        where: its name, for the log.
    """
    kind = type(value)
    if kind in _TYPED and not (kind is defaultdict and factory_name(value) == ""):
        typed = _typed(value, lambda item: with_types(item, where))
        held = with_types(vars(value), where) if kind is OrderedDict else {}  # the _metadata of a module's state
        return _Marked("attributes", [typed, held]) if held else typed
    base = next((each for each in (dict, list, tuple) if isinstance(value, each)), None)
    if base is None or kind is _Marked:
        return value
    if kind is not base:
        _log_plain(where, f"{kind.__module__}.{kind.__qualname__}", base.__name__)
    if base is dict:
        return {key: with_types(item, where) for key, item in value.items()}
    if _PLAIN.issuperset(map(type, value)):
        return base(value)
    return base([with_types(item, where) for item in value])


@functools.cache
def _log_plain(where: str, kind: str, base: str) -> None:
    logger.warning("%s holds a %s: a checkpoint keeps what is in it, and a resume gets it as a %s.", where, kind, base)


def _unnamed() -> Any:
    """Replace what a ``defaultdict`` makes where a checkpoint cannot name it."""
    raise NotSerialisable("what this defaultdict makes is not known from the checkpoint")


def factory_name(value: defaultdict[Any, Any]) -> str | None:
    """Return the name of what a ``defaultdict`` makes; empty where a checkpoint cannot name it."""
    if value.default_factory is None:
        return None
    return next((name for name, kind in _FACTORIES.items() if kind is value.default_factory), "")


def require_named(saved: Any) -> Any:
    """Return a decoded tree.

    Raises:
        NotSerialisable: it holds a ``defaultdict`` that can only be filled into a live one, which knows what it makes.
    """
    if isinstance(saved, defaultdict) and saved.default_factory is _unnamed:
        _unnamed()
    for each in saved.values() if isinstance(saved, dict) else saved if isinstance(saved, list | tuple | deque) else ():
        require_named(each)
    return saved


def is_numeric(value: Any) -> bool:
    """Return whether a value is an array or a scalar of numpy that a checkpoint can hold."""
    import numpy as np

    if type(value) is not np.ndarray and not issubclass(type(value), np.generic):
        return False
    dtype = value.dtype
    return dtype.kind in "biufc" and dtype.isnative and dtype.itemsize <= (16 if dtype.kind == "c" else 8)


class Reference(NamedTuple):
    """A tensor of an encoded tree, which is not read: its key in the safetensors file."""

    key: str


def encode(tree: Any) -> tuple[bytes, dict[str, torch.Tensor]]:
    """Split a tree into a JSON document and the tensors it refers to.

    Raises:
        NotSerialisable: the tree holds an object that is not data; the message names its place.
    """
    tensors: dict[str, torch.Tensor] = _WithLayouts()
    document = msgspec.json.encode(_encode(tree, "", tensors))
    return document, _unshared(tensors)


class _WithLayouts(dict[str, Any]):
    """The tensors of a tree that is decoded again; of one that is only digested, what counts is in them."""


def merged(document: bytes, fields: Mapping[str, Any]) -> bytes:
    """Return the document of a dict with other values, without tensors, for some of its fields."""
    others, _ = encode(dict(fields))
    return msgspec.json.encode({**msgspec.json.decode(document), **msgspec.json.decode(others)})


def decode(document: bytes, tensors: dict[str, torch.Tensor]) -> Any:
    """Rebuild the tree that :func:`encode` split.

    Raises:
        ValueError: the document is not what :func:`encode` wrote, or refers to other tensors.
    """
    try:
        return _decode(msgspec.json.decode(document), tensors)
    except _MALFORMED as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def as_loaded(value: Any) -> Any:
    """Return a copy of data as it comes back from a checkpoint, whether :func:`exact` has copied it or not."""
    return decode(*encode(exact(copy.deepcopy(value))))


_MALFORMED = (
    *(msgspec.MsgspecError, UnicodeDecodeError, RecursionError),
    *(LookupError, ValueError, TypeError, AttributeError, RuntimeError, OverflowError),
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
    if node.get("$") in ("array", "scalar", "bytes", "complex", "sparse"):
        return _bare(node["of"])
    if node.get("$") == "device":
        return _bare(node["of"][1])
    if node.get("$") == "tensor":
        return {"$": "tensor", "key": node["key"]}
    return {key: _bare(item) for key, item in node.items()}


def _encode(value: Any, where: str, tensors: dict[str, torch.Tensor]) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _require_unicode(value, where)
    if type(value) is dict:
        return _encode_dict(value, where, tensors)
    if isinstance(value, _Marked):
        return {"$": value.kind, "of": _encode(value.of, where, tensors)}
    import numpy as np  # behind what most values are: each asks for it
    import torch

    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, where, tensors)
    if isinstance(value, np.ndarray | np.generic):
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        array = _require_numeric(np.array(value), where)
        return {"$": kind, "of": _encode(torch.from_numpy(array), where, tensors)}
    if isinstance(value, bytes | bytearray):
        content = torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0, dtype=torch.uint8)
        return {"$": "bytes", "of": _add_tensor(content, where, tensors)}
    if isinstance(value, int):
        return int(value) if -_SAFE_INTEGER <= value < _SAFE_INTEGER else {"$": "int", "of": str(int(value))}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$": "float", "of": repr(float(value))}
    if isinstance(value, Mapping):
        return _encode_dict(value, where, tensors)
    if isinstance(value, list):
        return [
            item if _is_json(item) else _encode(item, f"{where}.{index}", tensors) for index, item in enumerate(value)
        ]
    if isinstance(value, tuple):
        return {"$": "tuple", "of": [_encode(item, f"{where}.{index}", tensors) for index, item in enumerate(value)]}
    if isinstance(value, set | frozenset):
        kind = "set" if isinstance(value, set) else "frozenset"
        return {"$": kind, "of": [_encode(item, where, tensors) for item in sorted(value, key=repr)]}
    if isinstance(value, torch.dtype):
        return {"$": "dtype", "of": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"$": "torch.device", "of": str(value)}
    raise NotSerialisable(
        f"{where.lstrip('.') or 'the state'} is a {type(value).__module__}.{type(value).__qualname__}, which a "
        "checkpoint cannot carry without running code when it is loaded: return numbers, strings, tensors, arrays, "
        "lists, tuples or dicts from state_dict()"
    )


def _is_json(value: Any) -> bool:
    """Return whether a value is one of JSON as it is, and most are: a save encodes hundreds of them."""
    kind = type(value)
    if kind is str:
        return str.isascii(value)
    if kind is int:
        return bool(-_SAFE_INTEGER <= value < _SAFE_INTEGER)
    return value is None or kind is bool or (kind is float and math.isfinite(value))


_TEXT = frozenset((str,))


def _encode_dict(value: Mapping[Any, Any], where: str, tensors: dict[str, torch.Tensor]) -> Any:
    if _TEXT.issuperset(map(type, value)) and "$" not in value:
        return {
            _require_unicode(key, where): item if _is_json(item) else _encode(item, f"{where}.{key}", tensors)
            for key, item in value.items()
        }
    pairs = [[_encode(key, where, tensors), _encode(item, f"{where}.{key}", tensors)] for key, item in value.items()]
    return {"$": "dict", "of": pairs}


def _require_unicode(value: str, where: str) -> str:
    if type(value) is str and value.isascii():
        return value
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise NotSerialisable(
            f"{where.lstrip('.') or 'the state'} has the text {value!r}, which is not Unicode: {error.reason}"
        ) from error
    return str(value)


def _encode_tensor(value: torch.Tensor, where: str, tensors: dict[str, torch.Tensor]) -> Any:
    import torch

    if value.layout is torch.sparse_coo:
        plain = value.detach()  # not coalesced: the order of its parts is that of a later sum
        parts = [plain._indices(), plain._values(), [*plain.shape], plain.is_coalesced()]  # seam: torch 2.6-2.13
        return {"$": "sparse", "of": _encode(parts, where, tensors)}
    dense = _require_dense(value, where).detach().resolve_conj().resolve_neg()
    if dense.dtype in (torch.complex128, torch.complex32):  # safetensors lacks these two types
        return {"$": "complex", "of": _encode_tensor(torch.view_as_real(dense), where, tensors)}
    node = _add_tensor(dense.contiguous(), where, tensors)
    if isinstance(tensors, _WithLayouts) and dense.dim() > 1 and _is_unusual(dense):
        node["strides"] = list(dense.stride())
    return node


def _is_unusual(tensor: torch.Tensor) -> bool:
    """Return whether a tensor lies otherwise than a new one would; also one of channels_last with a single channel."""
    import torch

    new = torch.empty(tensor.shape, device="meta")
    return new.stride() != tensor.stride() and _lies_densely(tensor.shape, tensor.stride())


def _lies_densely(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether a tensor of that layout fills its memory: a permuted one, such as one of channels_last."""
    import torch

    size = torch.empty_strided(shape, strides, dtype=torch.uint8, device="meta").untyped_storage().nbytes()
    return size == math.prod(shape)


def _laid_out(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """Return a tensor in the layout that it had: kernels are chosen by it, and so is the order of a sum."""
    import torch

    if not _lies_densely(tensor.shape, strides):
        raise ValueError(f"a tensor of shape {list(tensor.shape)} cannot have the strides {strides}")
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor)


def _add_tensor(plain: torch.Tensor, where: str, tensors: dict[str, torch.Tensor]) -> Any:
    key = f"{len(tensors)}{where}"
    tensors[key] = plain
    return {"$": "tensor", "key": key}


def _require_dense(value: torch.Tensor, where: str) -> torch.Tensor:
    import torch

    if value.layout is not torch.strided or value.is_quantized or value.is_meta:
        raise NotSerialisable(
            f"{where.lstrip('.') or 'the state'} is a {value.dtype} tensor of layout {value.layout} on {value.device}; "
            "expected a dense tensor with data"
        )
    return value


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
    if not is_numeric(array):
        raise NotSerialisable(
            f"{where.lstrip('.') or 'the state'} is a numpy array of {array.dtype}; expected numbers of at most 64 "
            "bits, in the machine's byte order"
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
        found = tensors[node["key"]]
        return _laid_out(found, node["strides"]) if "strides" in node else found
    return _DECODERS[kind](node["of"], tensors)


def _decode_dtype(of: Any, tensors: dict[str, torch.Tensor]) -> Any:
    import torch

    # vars(), not getattr(): torch imports submodules on attribute access, and the name comes from a file.
    dtype = vars(torch).get(of)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{of!r} is not a torch dtype")
    return dtype


def _decode_torch_device(of: Any, tensors: dict[str, torch.Tensor]) -> Any:
    import torch

    return torch.device(of)


def _decode_complex(of: Any, tensors: dict[str, torch.Tensor]) -> Any:
    import torch

    return torch.view_as_complex(_decode(of, tensors))


def _decode_sparse(of: Any, tensors: dict[str, torch.Tensor]) -> Any:
    import torch

    indices, values, size, is_coalesced = _decode(of, tensors)
    return torch.sparse_coo_tensor(indices, values, size, check_invariants=True, is_coalesced=is_coalesced)


def _decode_pairs(of: Any, tensors: dict[str, torch.Tensor]) -> list[tuple[Any, Any]]:
    return [(_decode(key, tensors), _decode(item, tensors)) for key, item in of]


def _decode_defaultdict(of: Any, tensors: dict[str, torch.Tensor]) -> Any:
    factory, pairs = of
    make = None if factory is None else _unnamed if factory == "" else _FACTORIES[factory]
    return defaultdict(make, _decode_pairs(pairs, tensors))


def _decode_attributes(of: Any, tensors: dict[str, torch.Tensor]) -> Any:
    value, held = of
    found = OrderedDict(_decode(value, tensors))
    vars(found).update(_decode(held, tensors))
    return found


def _decode_on_device(of: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Return a tensor on the kind of device where it was; on the CPU, where there is none here."""
    device, tensor = of[0], _decode(of[1], tensors)
    return tensor.to(device) if device == devices.kind() else tensor


_DECODERS: dict[str, Any] = {
    "Counter": lambda of, tensors: Counter(dict(_decode_pairs(of, tensors))),
    "OrderedDict": lambda of, tensors: OrderedDict(_decode_pairs(of, tensors)),
    "defaultdict": _decode_defaultdict,
    "deque": lambda of, tensors: deque(_decode(of[1], tensors), maxlen=of[0]),
    "attributes": _decode_attributes,
    "device": _decode_on_device,
    "torch.device": _decode_torch_device,
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
    "sparse": _decode_sparse,
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
    tensors: dict[str, torch.Tensor] = {}
    try:
        return digest(msgspec.json.encode(_encode(tree, "", tensors)), tensors)
    except NotSerialisable:
        return None
