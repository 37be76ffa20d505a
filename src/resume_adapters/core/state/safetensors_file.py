"""Files of safetensors, byte for byte as the library writes them, in less than it takes for hundreds of tensors."""

from __future__ import annotations

import functools
import json
import math
import struct
from collections.abc import Mapping
from typing import Any

from resume_adapters.core.state.comparison import bits


def safetensors_bytes(tensors: Mapping[str, Any]) -> bytes:
    """Return a file with these tensors, which are dense."""
    header, offsets = safetensors_header(tensors, None)
    return b"".join([header, *(bits(tensors[name]).numpy().data for name in offsets)])


def safetensors_header(tensors: Mapping[str, Any], metadata: Any) -> tuple[bytes, Mapping[str, int]]:
    """Return how a file of safetensors begins, and where behind that each tensor is.

    The library itself gives the order, for empty tensors of the same names and dtypes. It is asked once for a model.
    """
    forms = tuple((name, each.dtype, tuple(each.shape)) for name, each in tensors.items())
    return _header(forms, None if metadata is None else tuple(metadata.items()))


@functools.lru_cache(maxsize=16)
def _header(
    forms: tuple[tuple[str, Any, tuple[int, ...]], ...], metadata: tuple[tuple[str, str], ...] | None
) -> tuple[bytes, Mapping[str, int]]:
    import torch
    from safetensors.torch import save

    empty = {name: torch.empty(0, dtype=dtype) for name, dtype, _ in forms}
    document = save(empty, None if metadata is None else dict(metadata))
    (length,) = struct.unpack_from("<Q", document)
    header, offsets, at = json.loads(document[8 : 8 + length]), {}, 0
    shapes = {name: (shape, math.prod(shape) * dtype.itemsize) for name, dtype, shape in forms}
    for name, entry in header.items():
        if name != "__metadata__":
            shape, size = shapes[name]
            entry.update(shape=list(shape), data_offsets=[at, at + size])
            offsets[name], at = at, at + size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, offsets
