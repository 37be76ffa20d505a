"""One save, copied: while a framework writes, what it writes goes into a block of memory, and later into its files.

The framework's own code runs as ever. ``torch.save`` and safetensors' ``save_file`` write into the block, each tensor
once, from whatever device. When the framework's save returns, everything is copied: nothing that happens afterwards can
reach the files.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from resume_adapters.core.saving.block import Block
from resume_adapters.core.state.safetensors_file import safetensors_header
from resume_adapters.core.storage.base import Bytes, Storage
from resume_adapters.core.storage.local import OpenFile

_CHUNK = 1 << 23
"""Bytes that are written and digested at a time."""


class _Piece(NamedTuple):
    """A part of a file, by its offset there, its offset in the block, and its length."""

    at: int
    begin: int
    bytes: int


@dataclass(frozen=True)
class _File:
    """A file of the checkpoint, by its path there, and what it gets later."""

    path: Path
    open: OpenFile
    pieces: list[_Piece] = field(default_factory=list)


class _NoRoom(Exception):
    """The block is too small."""


class CopiedSave:
    """A save that is copied into memory.

    Args:
        directory: where the checkpoint is written: a directory, or one file.
        block: gets the copies.

    Attributes:
        lacks_room: something did not fit, and was written at once.
    """

    def __init__(self, directory: Path, block: Block) -> None:
        block.clear()
        self.lacks_room = False
        self._directory = directory
        self._block = block
        self._thread = threading.get_ident()
        self._files: list[_File] = []
        self._storages: dict[tuple[Any, int], tuple[int, int]] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing was copied."""
        return not self._files

    # ---- On the training's thread, while the framework writes

    def torch_save(self, native: Callable[..., None], obj: Any, f: Any, *arguments: Any, **keywords: Any) -> None:
        """Copy in place of ``torch.save``."""
        stream = f.raw if type(f).__name__ == "NoCloseWriter" else f  # seam: torch 2.7-2.13
        path = self._relative(f if isinstance(f, os.PathLike) else getattr(stream, "name", f))
        is_open = path is not None and hasattr(stream, "fileno")
        at = stream.tell() if is_open else 0
        is_usual = not arguments and keywords in ({}, {"_use_new_zipfile_serialization": True})
        if path is not None:
            self._forget(path, at)
        if path is None or not is_usual:
            native(obj, f, *arguments, **keywords)
            return
        size = self._archive(native, obj)
        if size is None or not self._add(path, stream.fileno() if is_open else None, at, size):
            native(obj, f)
        elif is_open:
            stream.seek(at + size)

    def save_file(
        self, native: Callable[..., None], tensors: dict[str, Any], filename: Any, metadata: Any = None
    ) -> None:
        """Copy in place of ``safetensors.torch.save_file``."""
        path = self._relative(filename)
        if path is not None:
            self._forget(path, 0)
        size = self._safetensors(tensors, metadata) if path is not None and _is_plain(tensors) else None
        if path is None or size is None or not self._add(path, None, 0, size):
            native(tensors, filename, metadata=metadata)

    def _relative(self, path: Any) -> Path | None:
        """Return a path relative to the checkpoint; ``None`` for what is not copied."""
        if threading.get_ident() != self._thread or not isinstance(path, str | os.PathLike):
            return None
        absolute = Path(os.path.abspath(path))
        return absolute.relative_to(self._directory) if absolute.is_relative_to(self._directory) else None

    def _forget(self, path: Path, at: int) -> None:
        """Drop what was copied for a file from an offset on: it is written again."""
        for each in [file for file in self._files if file.path == path]:
            each.pieces[:] = [piece for piece in each.pieces if piece.at < at]
            if not each.pieces:
                self._files.remove(each)
                each.open.close()

    def _archive(self, native: Callable[..., None], obj: Any) -> int | None:
        """Write what ``torch.save`` does into the block, and return its size; ``None`` where that cannot be done."""
        import torch

        storages: dict[str, Any] = {}
        region = _Region(self._block)
        try:
            with torch.serialization.skip_data():
                native(obj, region, pickle_module=_noting(storages))
        except _NoRoom:
            self.lacks_room = True
            return None
        except RuntimeError:  # of quantized and nested tensors it writes no archive with holes
            return None
        sources = [each for each in storages.values() if each.nbytes() and each.device.type != "meta"]
        if [size for _, size in region.holes] != [each.nbytes() for each in sources]:
            return None
        for (begin, size), source in zip(region.holes, sources, strict=True):
            self._block.copy(begin, torch.empty(0, dtype=torch.uint8, device=source.device).set_(source))
            self._storages[source.device, source.data_ptr()] = begin, size
        return region.size

    def _safetensors(self, tensors: Mapping[str, Any], metadata: Any) -> int | None:
        """Write a file of safetensors into the block, and return its size; ``None`` where there is no room."""
        import torch

        header, offsets = safetensors_header(tensors, metadata)
        region = _Region(self._block)
        try:
            region.write(memoryview(header))
            for name in offsets:  # in the order of the file
                source = tensors[name].detach().reshape(-1).view(torch.uint8)
                begin = region.leave(source.numel())
                self._block.copy(begin, source)
                self._storages[source.device, source.data_ptr()] = begin, source.numel()
        except _NoRoom:
            self.lacks_room = True
            return None
        return region.size

    def _add(self, path: Path, descriptor: int | None, at: int, size: int) -> bool:
        """Assign what was just written into the block to a file; return whether enough files can be open."""
        file = next((each for each in self._files if each.path == path and at), None)
        if file is None:
            opened = OpenFile.create(self._directory / path) if descriptor is None else OpenFile.same_as(descriptor)
            if not opened.leaves_enough:
                opened.close()
                return False
            file = _File(path, opened)
            self._files.append(file)
        file.pieces.append(_Piece(at, self._block.begin(), size))
        self._block.take(size)
        return True

    def end(self) -> None:
        """Give each file its size. What the framework has renamed is written now, and what it has removed is not."""
        for each in list(self._files):
            if each.open.has_name(self._directory / each.path):
                each.open.extend(max(piece.at + piece.bytes for piece in each.pieces))
            else:
                self._files.remove(each)
                self._write_at_once(each)
            each.open.close()

    def _write_at_once(self, file: _File) -> None:
        if not file.open.is_removed:
            self._block.wait()
            for at, begin, size in file.pieces:
                file.open.write(at, self._block.memory[begin : begin + size])

    def abandon(self) -> None:
        """Close the files of a save that has failed."""
        for each in self._files:
            each.open.close()
        self._files.clear()

    def copy_of(self, tensor: Any) -> Any:
        """Return the copy of a contiguous tensor that is all of its storage; ``None``: there is none."""
        begin, size = self._storages.get((tensor.device, tensor.data_ptr()), (0, 0))
        if not size or size != tensor.numel() * tensor.element_size() or not tensor.is_contiguous():
            return None
        return self._block.tensor(begin, size).view(tensor.dtype).view(tensor.shape)

    # ---- On the thread that commits

    def wait(self) -> None:
        """Wait until everything is copied that devices copy."""
        self._block.wait()

    def write(self, storage: Storage, directory: Path) -> dict[Path, tuple[int, str]]:
        """Write the files, and return the size and the digest of each, by its path in the checkpoint.

        Args:
            directory: where the checkpoint is now.

        Raises:
            OSError: one could not be written.
        """
        return {each.path: self._write(storage, directory / each.path, each.pieces) for each in self._files}

    def _write(self, storage: Storage, path: Path, pieces: list[_Piece]) -> tuple[int, str]:
        hasher, end = xxhash.xxh3_128(), 0
        for offset, content, is_copied in self._parts(storage, path, pieces):
            if is_copied:
                storage.write_range(path, offset, content)
            hasher.update(content)
            end = offset + len(content)
        return end, hasher.hexdigest()

    def _parts(self, storage: Storage, path: Path, pieces: list[_Piece]) -> Iterator[tuple[int, Bytes, bool]]:
        """Yield a file from its begin to its end, each part with its offset and whether it comes from the block."""
        end = max(storage.size(path), pieces[-1].at + pieces[-1].bytes)
        at = 0
        for piece in (*sorted(pieces), _Piece(end, 0, 0)):
            while at < piece.at and (content := storage.read_range(path, at, min(_CHUNK, piece.at - at))):
                yield at, content, False
                at += len(content)
            for begin in range(0, piece.bytes, _CHUNK):
                count = min(_CHUNK, piece.bytes - begin)
                start = piece.begin + begin
                yield piece.at + begin, self._block.memory[start : start + count], True
            at = piece.at + piece.bytes


class _Region:
    """What is free of a block, as a file to which ``torch.save`` writes. It leaves a hole where it moves on.

    Attributes:
        size: bytes written so far, with the holes.
        holes: of each hole that ``torch.save`` has left, the offset in the block, and the length.
    """

    def __init__(self, block: Block) -> None:
        self.size = 0
        self.holes: list[tuple[int, int]] = []
        self._block = block
        self._begin = block.begin()

    def leave(self, count: int) -> int:
        """Leave a hole, and return its offset in the block."""
        begin = self._begin + self.size
        if begin + count > self._block.size:
            raise _NoRoom
        self.size += count
        return begin

    def write(self, content: memoryview) -> int:
        """Write behind what is there."""
        begin = self.leave(len(content))
        self._block.memory[begin : begin + len(content)] = content
        return len(content)

    def seek(self, count: int, whence: int) -> int:
        """Leave a hole for a storage, and note it."""
        assert whence == os.SEEK_CUR, "torch.save only moves on"
        self.holes.append((self.leave(count), count))
        return self.size

    def flush(self) -> None:
        """Do nothing: it is memory."""


def _noting(storages: dict[str, Any]) -> Any:
    """Return a module like ``pickle`` whose pickler notes the storages that ``torch.save`` numbers."""
    from torch import TypedStorage, UntypedStorage

    kinds = (TypedStorage, UntypedStorage)

    class Pickler(pickle.Pickler):
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            number = self.persistent_id  # torch.save's own: its pickler derives this one

            def persistent_id(obj: Any) -> Any:
                if not isinstance(obj, kinds):  # of each number and text too: the state of a generator has hundreds
                    return None
                found = number(obj)
                storages[found[2]] = getattr(obj, "_untyped_storage", obj)  # seam: torch 2.6-2.13
                return found

            self.persistent_id = persistent_id  # type: ignore[method-assign]
            super().__init__(*arguments, **keywords)

    module: Any = types.ModuleType(pickle.__name__)
    module.Pickler = Pickler
    return module


def _is_plain(tensors: Mapping[str, Any]) -> bool:
    """Return whether tensors are what safetensors writes byte by byte; the rest it refuses, and says why."""
    import torch

    own_kinds = all(type(each) in (torch.Tensor, torch.nn.Parameter) for each in tensors.values())
    strided = own_kinds and all(each.layout is torch.strided and each.is_contiguous() for each in tensors.values())
    held = [each for each in tensors.values() if each.numel()]
    own = {each.untyped_storage().data_ptr() for each in held} if strided else set()
    return strided and len(own) == len(held) > 0 and sys.byteorder == "little"
