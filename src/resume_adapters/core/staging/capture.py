"""What a framework writes in a save, as a plan: which bytes of memory belong where in which file.

The framework's own code runs as ever. What stands in for ``torch.save`` and for safetensors' ``save_file`` writes each
file with holes in place of the tensors, and the arena gets a copy of those.
"""

from __future__ import annotations

import json
import os
import pickle
import struct
import sys
import threading
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from resume_adapters.core.staging.arena import Arena
from resume_adapters.core.staging.owned import OwnedStorage
from resume_adapters.core.storage import fill
from resume_adapters.core.storage.fill import Piece


@dataclass(frozen=True)
class CapturedFile:
    """A file with holes, and what fills them.

    Attributes:
        path: relative to the checkpoint.
        descriptor: the file, open for reading and writing.
        pieces: the parts of the arena.
    """

    path: Path
    descriptor: int
    pieces: list[Piece]


@dataclass
class Capture:
    """What is captured of one save, on the thread that makes this.

    Args:
        directory: where the checkpoint is written: a directory, or one file.
        arena: gets the copies.
        owned: the storages that only optimizers change, by their addresses: those are copied later.

    Attributes:
        files: what was captured.
        later: the storages to copy, each after its offset in the arena.
        now: storages of ``owned`` that were copied at once, likewise.
        lacking: bytes for which there was no room.
    """

    directory: Path
    arena: Arena
    owned: Mapping[int, OwnedStorage]
    files: list[CapturedFile] = field(default_factory=list)
    later: list[tuple[int, OwnedStorage]] = field(default_factory=list)
    now: list[tuple[int, OwnedStorage]] = field(default_factory=list)
    lacking: int = 0

    def __post_init__(self) -> None:
        self._thread = threading.get_ident()

    def close(self) -> None:
        """Close the files."""
        for each in self.files:
            os.close(each.descriptor)
        self.files.clear()

    # ---- torch.save

    def torch_save(self, native: Callable[..., None], obj: Any, f: Any, *arguments: Any, **keywords: Any) -> None:
        """Stand in for ``torch.save``."""
        path = self._relative(f if isinstance(f, os.PathLike) else getattr(f, "name", f))
        if path is None or arguments or keywords not in ({}, {"_use_new_zipfile_serialization": True}):
            native(obj, f, *arguments, **keywords)
            return
        storages = save_with_holes(native, obj, f)
        if storages is None or not self._has_room(sum(each.nbytes() for each in storages.values()), len(storages)):
            if hasattr(f, "seek"):
                f.seek(0)  # what was written there is shorter than the whole file
            native(obj, f)
        elif storages:
            pieces = [self._copy_storage(record, each) for record, each in storages.items()]
            if hasattr(f, "flush"):
                f.flush()
            self.files.append(CapturedFile(path, fill.open_to_fill(self.directory / path), pieces))

    def _copy_storage(self, place: str, storage: Any) -> Piece:
        size = storage.nbytes()
        offset = self.arena.reserve(size)
        owned = self.owned.get(storage.data_ptr()) if storage.device.type == "cpu" else None
        if owned is None or owned.bytes != size:
            self._copy(offset, storage, size)
        else:
            self._copy_owned(offset, owned)
        return Piece(place, offset, size)

    # ---- safetensors

    def save_file(
        self, native: Callable[..., None], tensors: dict[str, Any], filename: Any, metadata: Any = None
    ) -> None:
        """Stand in for ``safetensors.torch.save_file``."""
        path = self._relative(filename)
        sizes = {name: each.numel() * each.element_size() for name, each in tensors.items()}
        if path is None or not _is_plain(tensors, sizes) or not self._has_room(sum(sizes.values()), len(sizes)):
            native(tensors, filename, metadata=metadata)
            return
        header, offsets = safetensors_header(tensors, metadata)
        end = len(header) + sum(sizes.values())
        descriptor = fill.create_with_hole(Path(filename), header, end)
        pieces = [
            self._copy_tensor(len(header) + offsets[name], tensors[name], size) for name, size in sizes.items() if size
        ]
        self.files.append(CapturedFile(path, descriptor, pieces))

    def _copy_tensor(self, place: int, tensor: Any, size: int) -> Piece:
        offset = self.arena.reserve(size)
        owned = self.owned.get(tensor.data_ptr()) if tensor.device.type == "cpu" else None
        if owned is None or owned.bytes != size:
            self._copy(offset, tensor.detach(), size)
        else:
            self._copy_owned(offset, owned)
        return Piece(place, offset, size)

    # ---- Both

    def _relative(self, path: Any) -> Path | None:
        """Return a path relative to the checkpoint; ``None`` for what is not captured."""
        if threading.get_ident() != self._thread or not isinstance(path, str | os.PathLike):
            return None
        absolute = Path(os.path.abspath(path))
        return absolute.relative_to(self.directory) if absolute.is_relative_to(self.directory) else None

    def _has_room(self, size: int, pieces: int) -> bool:
        fits = self.arena.has_room(size, pieces)
        self.lacking += 0 if fits else size
        return fits

    def _copy(self, offset: int, source: Any, size: int) -> None:
        held = source.cpu()  # of what is on the CPU, itself
        self.arena.copy(offset, held.data_ptr(), size)

    def _copy_owned(self, offset: int, owned: OwnedStorage) -> None:
        if owned.may_wait:
            owned.sample()
            self.later.append((offset, owned))
        else:
            self._copy(offset, owned.storage, owned.bytes)
            self.now.append((offset, owned))


def save_with_holes(save: Callable[..., None], obj: Any, f: Any) -> dict[str, Any] | None:
    """Let ``torch.save`` write a file with holes, and return the storages that belong there, by the names of records.

    Returns:
        ``None`` where it cannot: quantized and nested tensors.
    """
    import torch

    storages: dict[str, Any] = {}
    try:
        with torch.serialization.skip_data():
            save(obj, f, pickle_module=_noting(storages))
    except RuntimeError:
        return None
    return {f"data/{key}": each for key, each in storages.items() if each.nbytes()}


def _noting(storages: dict[str, Any]) -> Any:
    """Return a module like ``pickle`` whose pickler notes the storages that ``torch.save`` numbers."""

    class Pickler(pickle.Pickler):
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            number = self.persistent_id  # torch.save's own: its pickler derives this one

            def persistent_id(obj: Any) -> Any:
                found = number(obj)
                if found is not None:
                    storages[found[2]] = getattr(obj, "_untyped_storage", obj)  # seam: torch 2.6-2.13
                return found

            self.persistent_id = persistent_id  # type: ignore[method-assign]
            super().__init__(*arguments, **keywords)

    module: Any = types.ModuleType(pickle.__name__)
    module.Pickler = Pickler
    return module


def _is_plain(tensors: Mapping[str, Any], sizes: Mapping[str, int]) -> bool:
    """Return whether tensors are what safetensors writes byte by byte; the rest it refuses, and says why."""
    import torch

    strided = all(each.layout is torch.strided and each.is_contiguous() for each in tensors.values())
    held = [name for name, size in sizes.items() if size]
    own = {tensors[name].untyped_storage().data_ptr() for name in held} if strided else set()
    return strided and len(own) == len(held) > 0 and sys.byteorder == "little"


def safetensors_header(tensors: Mapping[str, Any], metadata: Any) -> tuple[bytes, dict[str, int]]:
    """Return how a file of safetensors begins, and where behind that each tensor is.

    The library itself gives the order, for empty tensors of the same names and dtypes.
    """
    import torch
    from safetensors.torch import save

    empty = {name: torch.empty(0, dtype=each.dtype) for name, each in tensors.items()}
    document = save(empty, metadata)
    (length,) = struct.unpack_from("<Q", document)
    header, offsets, at = json.loads(document[8 : 8 + length]), {}, 0
    for name, entry in header.items():
        if name != "__metadata__":
            end = at + tensors[name].numel() * tensors[name].element_size()
            entry.update(shape=list(tensors[name].shape), data_offsets=[at, end])
            offsets[name], at = at, end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, offsets
