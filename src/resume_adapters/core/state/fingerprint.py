"""A digest of any data that a user may have: a batch in whatever form, an attribute of a trainer.

It only reads: no random number is drawn, nothing is moved to another device but the bytes that are hashed, nothing is
taken from an iterator. Of a batch, no code of the user is run but what reads a container or says what to pickle of an
object; of what nobody gave to be read, none. What cannot be read counts by the name of its type.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import inspect
import math
import operator
import struct
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import xxhash

from resume_adapters.core.state.comparison import bits
from resume_adapters.core.state.rng import GeneratorState, is_generator
from resume_adapters.core.state.untouched import attributes, container, has_attributes, in_slots, is_a, items

_LONGEST = 1_000_000
"""Values that one digest covers at most: a batch with more of them holds tensors."""

_PICKLE_PROTOCOL = 4
"""The newest one that gives all bytes with the object; from 5 on they may be given beside it."""


_ROUTINES = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.MethodDescriptorType)

_ITERATORS = 100
"""Iterators within one another that are looked at, at most."""


def value_digest(value: Any, *, sampled_above: int | None = None, untouched: bool = False) -> str:
    """Return a digest of 16 hexadecimal digits.

    It covers tensors and arrays with shape and dtype, mappings (in any order), sequences, sets, dataclasses, named
    tuples, strings, numbers, ``None``, generators by their state, objects that say what to pickle of them by that, and
    others with a ``__dict__`` by their attributes; anything else by the name of its type.

    Args:
        value: the value.
        sampled_above: bytes; of a tensor or an array that has more, about so many are read, spread evenly over it.
        untouched: read what objects hold, and run no code of their classes.
    """
    walk = _Walk(sampled_above, untouched=untouched)
    walk.add(value)
    return walk.hasher.hexdigest()


class _Walk:
    """One walk through a value.

    Attributes:
        hasher: the digest so far.
    """

    def __init__(self, sampled_above: int | None, *, untouched: bool) -> None:
        self.hasher = xxhash.xxh3_64()
        self._sampled_above = sampled_above
        self._untouched = untouched
        self._inside: set[int] = set()
        self._left = _LONGEST

    def add(self, value: Any) -> None:
        """Add a value to the digest."""
        self._left -= 1
        plain = _plain(value)
        if plain is not None:
            self.hasher.update(plain)
            return
        self._name("object", value)
        if id(value) in self._inside:  # a value that holds itself
            return
        self._inside.add(id(value))
        try:
            self._content(value)
        except Exception as error:  # of any kind: a container of the user's may raise what it likes
            self.hasher.update(f"unreadable {type(error).__name__}".encode())
        finally:
            self._inside.discard(id(value))

    def _name(self, kind: str, value: Any) -> None:
        self.hasher.update(f"{kind} {type(value).__module__}.{type(value).__qualname__}\0".encode())

    def _content(self, value: Any) -> None:
        import numpy as np
        import torch

        if is_a(value, torch.Tensor):
            has_own = type(value) not in (torch.Tensor, torch.nn.Parameter)
            is_plain = type(value).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
            asks = self._untouched and has_own and is_plain
            self._tensor(torch.Tensor.as_subclass(value, torch.Tensor) if asks else value)
        elif is_a(value, np.ndarray, np.generic):
            self._array(np.asarray(value))
        elif is_generator(value):
            self.add(GeneratorState(value).state_dict())
        elif is_a(value, torch.dtype, torch.device):
            self.hasher.update(str(value).encode())
        elif self._untouched:
            self._held(value)
        elif isinstance(value, Mapping):
            self._mapping(value.items())
        elif isinstance(value, Set):
            self._items(sorted(map(self._digest, value)))
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            self._mapping({each.name: getattr(value, each.name, None) for each in dataclasses.fields(value)}.items())
        elif isinstance(value, Sequence):
            self._items(value)
        elif isinstance(value, type) or inspect.isroutine(value):
            self.hasher.update(f"{value.__module__}.{value.__qualname__}".encode())
        elif _chooses_its_state(type(value)):  # beside it there may be what the object has only looked up
            self._items(_pickled(value))
        elif hasattr(value, "__dict__"):
            self._mapping(vars(value).items())

    def _held(self, value: Any) -> None:
        """Add what an object holds, in its container, its attributes and its slots; or what it shows of itself."""
        kind = container(value)
        if kind is dict:
            self._mapping(dict.items(value))
        elif kind is not None:
            read = items(value)
            self._items(sorted(map(self._digest, read)) if kind in (set, frozenset) else read)
        if type(value) is functools.partial:
            self._items([value.func, value.args, value.keywords])
        if is_a(value, *_ROUTINES):
            self.hasher.update(f"{value.__module__}.{value.__qualname__}".encode())
        elif has_attributes(value):
            held = {**attributes(value), **in_slots(value)}
            self._mapping(held.items())
        elif kind is None:
            shown = _progress(value) if is_a(value, Iterator) else _bytes(value)
            self.add(_printed(value) if shown is None else shown)

    def _digest(self, value: Any) -> str:
        return value_digest(value, untouched=self._untouched)

    def _tensor(self, tensor: Any) -> None:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        self.hasher.update(f"{local.dtype} {tuple(local.shape)} {local.layout}\0".encode())
        if local.is_sparse:
            whole = local.detach().coalesce()
            self._items([whole.indices(), whole.values()])
        elif not local.is_meta:
            stride = self._stride(local.numel() * local.element_size())
            self.hasher.update(bits(local.detach().reshape(-1)[::stride] if stride > 1 else local).numpy().data)

    def _array(self, array: Any) -> None:
        import numpy as np

        self.hasher.update(f"{array.dtype.str} {array.shape}\0".encode())
        if array.dtype.hasobject:
            self._items(array.tolist() if array.ndim else [array.item()])
        else:
            read = array.reshape(-1)[:: self._stride(array.nbytes)]
            self.hasher.update(np.ascontiguousarray(read).view(np.uint8).data)

    def _stride(self, size: int) -> int:
        return 1 if self._sampled_above is None else max(1, math.ceil(size / self._sampled_above))

    def _mapping(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        by_key = {key if self._is_word(key) else self._digest(key): value for key, value in pairs}
        self.hasher.update(f"{len(by_key)}\0".encode())
        for key in sorted(by_key):
            self.add(key)
            self.add(by_key[key])

    def _is_word(self, key: Any) -> bool:
        return type(key) is str if self._untouched else isinstance(key, str)

    def _items(self, read: Iterable[Any]) -> None:
        for each in read:
            if self._left <= 0:
                return
            self.add(each)
        self.hasher.update(b"end\0")


def _chooses_its_state(kind: type) -> bool:
    """Return whether the class has its own way to say what of an object is pickled."""
    names = ("__reduce__", "__reduce_ex__", "__getstate__")  # before Python 3.11 ``object`` has no ``__getstate__``
    return any(getattr(kind, name, None) is not getattr(object, name, None) for name in names)


def _pickled(value: Any) -> list[Any]:
    """Return what an object would be pickled by: a name, or how it is made, its state and its items."""
    reduced = value.__reduce_ex__(_PICKLE_PROTOCOL)
    if isinstance(reduced, str):
        return [reduced]
    return [list(each) if isinstance(each, Iterator) else each for each in reduced]


def _plain(value: Any) -> bytes | None:
    """Return the bytes of a plain value, with its kind; ``None`` for anything else."""
    kind = type(value)
    if value is None or kind is bool:
        return f"{value}\0".encode()
    if kind is int:
        return f"int {value:x}\0".encode()
    if kind is float:
        return b"float" + struct.pack("<d", value)
    if kind is complex:
        return b"complex" + struct.pack("<dd", value.real, value.imag)
    if kind is str:
        encoded = value.encode("utf-8", "surrogatepass")
        return b"str %d\0%b" % (len(encoded), encoded)
    if kind is bytes or kind is bytearray:
        return b"bytes %d\0%b" % (len(value), value)
    return None


def _progress(iterator: Any) -> list[Any]:
    """Return how far an iterator is, from what it and the iterators that it reads from show of themselves."""
    found: list[Any] = []
    waiting, seen = [iterator], {id(iterator)}
    while waiting and len(seen) < _ITERATORS:
        each = waiting.pop()
        if type(each) is types.GeneratorType:
            found.append(inspect.getgeneratorstate(each))
        elif type(each) in _ASKING:
            found.append(each.__reduce__()[-1])
        elif has_attributes(each):
            found.append(attributes(each).get("_num_yielded"))  # seam: torch 2.13, a pass over a DataLoader
        elif is_a(each, Iterator):
            found += [operator.length_hint(each, -1), _printed(each)]
        for held in gc.get_referents(each):
            if type(held) in (bool, int, float, str, bytes):
                found.append(held)
            elif id(held) not in seen and _has_progress(held):
                seen.add(id(held))
                waiting.append(held)
    return found


_ASKING = (reversed, type(iter(type("", (), {"__getitem__": lambda *_: 0})())))
"""Iterators that ask the object which they go through for its length."""


def _has_progress(value: Any) -> bool:
    """Return whether a value shows how far it is, or holds what does: ``zip`` a tuple, a generator of 3.10 a frame."""
    if type(value) in (types.GeneratorType, types.FrameType):
        return True
    if type(value) is tuple:
        return len(value) < _ITERATORS
    return is_a(value, Iterator) and (not has_attributes(value) or "_num_yielded" in attributes(value))


def _bytes(value: Any) -> Any:
    """Return the bytes of an object that shows them, such as an ``array.array``, as an array; ``None`` of another."""
    import numpy as np

    if inspect.isfunction(getattr(type(value), "__buffer__", None)):
        return None
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
