"""Whether files with holes can be filled here: tried with the torch and the safetensors that are installed."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from resume_adapters.core.staging.arena import Arena
from resume_adapters.core.staging.capture import save_with_holes
from resume_adapters.core.state.safetensors_file import safetensors_header
from resume_adapters.core.storage import fill
from resume_adapters.core.storage.fill import Piece, Record

_ROOM = 1 << 16


def is_exact() -> bool:
    """Return whether captured files are, byte for byte, those that the installed libraries write."""
    import torch

    whole = torch.arange(1000, dtype=torch.float32)
    tensors = {"b": whole.bfloat16(), "ä": whole.clone().reshape(10, 100), "n": torch.tensor(3), "a": whole > 7}
    tree = {"state": {0: {**tensors, "view": whole[3:7]}}, "groups": [{"lr": 0.1}], "empty": torch.empty(0)}
    arena = Arena(_ROOM)
    try:
        return _is_torch_exact(arena, tree) and _is_safetensors_exact(arena, tensors)
    finally:
        arena.close()


def _is_torch_exact(arena: Arena, tree: Any) -> bool:
    import torch

    with fill.scratch_file() as native, fill.scratch_file() as ours:
        pieces = []
        for each in (tree, torch.arange(1000)):  # as torch.distributed.checkpoint writes one after another
            torch.save(each, native)
            begin = ours.tell()
            storages = save_with_holes(torch.save, each, ours)
            if storages is None:
                return False
            ours.flush()
            end = ours.tell()
            pieces += [_copied(arena, Record(name, begin, end), source) for name, source in storages.items()]
        try:
            fill.fill(ours.fileno(), pieces, arena.memory)
        except (ValueError, KeyError, struct.error):
            return False
        native.seek(0)
        ours.seek(0)
        return native.read() == ours.read()


def _is_safetensors_exact(arena: Arena, tensors: Mapping[str, Any]) -> bool:
    import torch
    from safetensors.torch import save

    metadata = {"format": "pt"}
    header, offsets = safetensors_header(tensors, metadata)
    start = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    with fill.scratch_file() as ours:
        pieces = [_copied(arena, 0, start)]
        pieces += [_copied(arena, len(header) + offsets[name], each) for name, each in tensors.items()]
        fill.fill(ours.fileno(), pieces, arena.memory)
        return ours.read() == save(dict(tensors), metadata)


def _copied(arena: Arena, place: int | Record, source: Any) -> Piece:
    size = source.nbytes() if callable(source.nbytes) else source.nbytes
    offset = arena.reserve(size)
    arena.copy(offset, source.data_ptr(), size)
    return Piece(place, offset, size)
