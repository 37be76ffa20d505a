"""A tree of data as one string of bytes: for what is written at each step, and read by another process of the run.

What most of a tree is (dicts, lists, numbers, text, tensors, arrays) msgpack has, or is given as an extension. The rest
is encoded as in a checkpoint.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from resume_adapters.core.state import encoding
from resume_adapters.core.state.comparison import bits
from resume_adapters.core.state.records import Deferred, Record
from resume_adapters.errors import NotSerialisable

LARGE = 1 << 16
"""Bytes from which on a tensor is left out."""

_TENSOR, _ARRAY, _LEFT_OUT, _ENCODED = range(1, 5)
"""The extensions."""

_PLAIN = frozenset((bool, int, float, str, bytes, type(None)))
_NEVER_WIDE = _PLAIN - {int, str}

_LEAST, _GREATEST = -(1 << 63), (1 << 64) - 1
"""The whole numbers that msgpack has."""


class _Content(msgspec.Struct, frozen=True, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    content: bytes


class _Encoded(msgspec.Struct, frozen=True, array_like=True):
    document: bytes
    tensors: dict[str, Any]


_encode = msgspec.msgpack.Encoder().encode


class Packer:
    """Packs trees.

    Records in it come back as trees. What they compute only when they are written is ``None`` there.
    """

    def __init__(self) -> None:
        self._plain = _PLAIN

    def pack(self, tree: Any) -> tuple[bytes, list[Any]]:
        """Return a tree as bytes, and the large tensors in it, which are left out.

        Raises:
            NotSerialisable: the tree holds an object that is not data.
        """
        try:
            return self._pack(tree)
        except (OverflowError, UnicodeEncodeError):  # it holds numbers or text that msgpack lacks, and will again
            self._plain = _NEVER_WIDE
        try:
            return self._pack(tree)
        except UnicodeEncodeError as error:
            raise NotSerialisable(f"a key of a dict is not Unicode: {error.reason}") from error

    def _pack(self, tree: Any) -> tuple[bytes, list[Any]]:
        large: list[Any] = []
        return _encode([self._packed(tree, large)]), large

    def _packed(self, value: Any, large: list[Any]) -> Any:
        """Return a value as msgpack takes it."""
        kind, plain = type(value), self._plain
        if kind in plain or (kind is int and _LEAST <= value <= _GREATEST) or (kind is str and value.isascii()):
            return value
        if kind is list:
            return [each if type(each) in plain else self._packed(each, large) for each in value]
        if isinstance(value, Record):
            return self._dict(value.values_on_disk(), large)
        if isinstance(value, Deferred):
            return None
        if kind is dict and all(type(key) is str for key in value):
            return self._dict(value, large)
        return _extension(value, large)

    def _dict(self, value: dict[str, Any], large: list[Any]) -> dict[str, Any]:
        plain = self._plain
        return {key: each if type(each) in plain else self._packed(each, large) for key, each in value.items()}


def _extension(value: Any, large: list[Any]) -> Any:
    import numpy as np
    import torch

    kind = type(value)
    if kind is torch.Tensor and value.is_cpu and value.layout is torch.strided and value.dtype in _dtypes():
        return _packed_tensor(value, large)
    if kind is np.ndarray and encoding.is_numeric(value):
        return msgspec.msgpack.Ext(_ARRAY, _encode(_Content(value.dtype.str, value.shape, value.tobytes())))
    return _encoded(value, large)


def _packed_tensor(tensor: Any, large: list[Any]) -> Any:
    if tensor.numel() * tensor.element_size() >= LARGE:
        large.append(tensor)
        return msgspec.msgpack.Ext(_LEFT_OUT, b"")
    dtype = str(tensor.dtype).removeprefix("torch.")
    # Most are the words of a generator: their bytes are had with fewer calls.
    content = (tensor if dtype == "uint8" else bits(tensor)).numpy().tobytes()
    return msgspec.msgpack.Ext(_TENSOR, _encode(_Content(dtype, tuple(tensor.shape), content)))


@functools.cache
def _dtypes() -> frozenset[Any]:
    """Return the types of tensors whose bytes are what they are."""
    import torch

    floats = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    return frozenset((torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *floats))


def _encoded(value: Any, large: list[Any]) -> Any:
    """Return what msgpack lacks as a checkpoint would have it.

    Raises:
        NotSerialisable: it is not data.
    """
    document, tensors = encoding.encode(value)
    packed = {key: _packed_tensor(tensor, large) for key, tensor in tensors.items()}
    return msgspec.msgpack.Ext(_ENCODED, _encode(_Encoded(document, packed)))


def unpack(packed: bytes, large: Sequence[Any]) -> Any:
    """Rebuild the tree that :class:`Packer` was given.

    Args:
        packed: what it returned.
        large: the tensors that it left out.

    Raises:
        msgspec.MsgspecError: it was given something else.
    """
    return msgspec.msgpack.decode(packed, type=tuple[Any], ext_hook=_Extensions(iter(large)))[0]


class _Extensions:
    """Rebuilds extensions.

    Args:
        large: the tensors that were left out.
    """

    def __init__(self, large: Iterator[Any]) -> None:
        self._large = large

    def __call__(self, code: int, content: memoryview) -> Any:
        if code == _LEFT_OUT:
            return next(self._large)
        if code == _ENCODED:
            found = msgspec.msgpack.decode(content, type=_Encoded, ext_hook=self)
            # What encoding marks is marked again: a deque is to come back as a deque once more.
            return encoding.exact(encoding.decode(found.document, found.tensors))
        return _tensor(content) if code == _TENSOR else _array(content)


def _tensor(packed: memoryview) -> Any:
    import torch

    found = msgspec.msgpack.decode(packed, type=_Content)
    dtype = getattr(torch, found.dtype)
    if not found.content:
        return torch.empty(found.shape, dtype=dtype)
    return torch.frombuffer(bytearray(found.content), dtype=dtype).reshape(found.shape)


def _array(packed: memoryview) -> Any:
    import numpy as np

    found = msgspec.msgpack.decode(packed, type=_Content)
    return np.frombuffer(bytearray(found.content), dtype=found.dtype).reshape(found.shape)
