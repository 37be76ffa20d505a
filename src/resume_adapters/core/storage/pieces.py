"""Files read and written piece by piece, with their digests on the way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import xxhash

from resume_adapters.core.storage.base import Bytes, Storage

_PIECE = 8 << 20
"""Bytes read at a time: many enough for few calls, few enough to count for nothing beside a checkpoint."""


def read_pieces(storage: Storage, path: Path) -> Iterator[bytes]:
    """Yield the content of a file from its begin to its end."""
    offset = 0
    while piece := storage.read_range(path, offset, _PIECE):
        yield piece
        offset += len(piece)


def write_pieces(storage: Storage, path: Path, pieces: Iterable[Bytes]) -> tuple[int, str]:
    """Create or replace a file; return its size and the XXH3-128 digest of what was written."""
    hasher, offset = xxhash.xxh3_128(), 0
    storage.write(path, b"")
    for piece in pieces:
        storage.write_range(path, offset, piece)
        hasher.update(piece)
        offset += len(piece)
    return offset, hasher.hexdigest()
