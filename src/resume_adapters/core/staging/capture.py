"""What a framework writes in a save, as a plan: which bytes of memory belong where in which file.

The framework's own code runs as ever. What stands in for ``torch.save`` and for safetensors' ``save_file`` writes each
file with holes in place of the tensors, and the arena gets a copy of those.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from resume_adapters.core.staging.arena import Arena
from resume_adapters.core.staging.owned import SMALLEST, OwnedStorage
from resume_adapters.core.state.safetensors_file import safetensors_header
from resume_adapters.core.storage import fill
from resume_adapters.core.storage.fill import Piece, Record

_SPARE = 64
"""Descriptors that captured files leave to everything else: each is open until the commit."""


@dataclass(frozen=True)
class CapturedFile:
    """A file with holes, and what fills them.

    Attributes:
        path: relative to the checkpoint; ``None``: the framework has given the file another name since.
        descriptor: the file, open for reading and writing.
        pieces: the parts of the arena.
        straight: what goes from where it is straight to the file, by its place there.
    """

    path: Path | None
    descriptor: int
    pieces: list[Piece]
    straight: dict[int | Record, OwnedStorage]

    def cut(self, begin: int) -> None:
        """Let go of what fills the file from an offset on; of an archive, its begin counts."""
        self.pieces[:] = [each for each in self.pieces if _begin(each.place) < begin]
        for place in [each for each in self.straight if _begin(each) >= begin]:
            del self.straight[place]

    @property
    def missing(self) -> list[Piece]:
        """What is still to be done for the file; where anything goes straight to it, everything is there already."""
        if not self.straight:
            return self.pieces
        copied = [Piece(each.place, None, each.bytes) for each in self.pieces]
        return [*copied, *(Piece(place, None, each.bytes) for place, each in self.straight.items())]


class _Hole(NamedTuple):
    """A part of a file that is missing.

    Attributes:
        place: see :class:`Piece`.
        source: the storage, or the tensor, that fills it.
        bytes: its length.
    """

    place: int | Record
    source: Any
    bytes: int


@dataclass
class Capture:
    """What is captured of one save, on the thread that makes this.

    Args:
        directory: where the checkpoint is written: a directory, or one file.
        arena: gets the copies.
        owned: the storages that only optimizers change, by their addresses: those are copied later.
        goes_straight: those are not copied, but written from where they are.
        wholly: those are digested now: what changes them before they are written is found.

    Attributes:
        files: what was captured.
        later: the storages to copy, each after its offset in the arena.
        now: storages of ``owned`` that were copied at once, likewise.
        lacking: bytes for which there was no room.
    """

    directory: Path
    arena: Arena
    owned: Mapping[int, OwnedStorage]
    goes_straight: bool = False
    wholly: bool = False
    files: list[CapturedFile] = field(default_factory=list)
    later: list[tuple[int, OwnedStorage]] = field(default_factory=list)
    now: list[tuple[int, OwnedStorage]] = field(default_factory=list)
    lacking: int = 0

    def __post_init__(self) -> None:
        self._thread = threading.get_ident()
        self._copies: dict[int, tuple[Piece, Any]] = {}

    def copy_of(self, tensor: Any) -> Any:
        """Return the tensor into which a tensor is copied, now or later; ``None``: it is not."""
        import torch

        piece, _ = self._copies.get(tensor.data_ptr(), (None, None))
        if piece is None or piece.bytes != _size(tensor) or not tensor.is_contiguous():
            return None
        return torch.frombuffer(
            self.arena.memory, dtype=tensor.dtype, count=tensor.numel(), offset=piece.begin or 0
        ).view(tensor.shape)

    def close(self) -> None:
        """Close the files, and let go of what they are filled with."""
        self._close(lambda file: True)
        self._copies.clear()

    def end(self) -> None:
        """Let go of files that the framework has removed since it wrote them, and of the names of those that moved."""
        self._close(lambda file: fill.is_removed(file.descriptor))
        self.files[:] = [each if self._is_in_place(each) else replace(each, path=None) for each in self.files]

    def _is_in_place(self, file: CapturedFile) -> bool:
        return file.path is not None and fill.leads_to(self.directory / file.path, file.descriptor)

    def _close(self, is_meant: Callable[[CapturedFile], bool]) -> None:
        for each in [file for file in self.files if is_meant(file)]:
            self.files.remove(each)
            os.close(each.descriptor)

    # ---- torch.save

    def torch_save(self, native: Callable[..., None], obj: Any, f: Any, *arguments: Any, **keywords: Any) -> None:
        """Stand in for ``torch.save``."""
        stream = _stream(f)
        path = self._relative(f if isinstance(f, os.PathLike) else getattr(stream, "name", f))
        is_open = path is not None and hasattr(stream, "seek")
        begin = stream.tell() if is_open else 0
        is_usual = not arguments and keywords in ({}, {"_use_new_zipfile_serialization": True})
        if path is not None:
            self._forget(path, begin)
        if path is None or not is_usual:
            native(obj, f, *arguments, **keywords)
            return
        storages = save_with_holes(native, obj, stream)
        end = stream.tell() if is_open else None
        holes = [_Hole(Record(name, begin, end), each, each.nbytes()) for name, each in (storages or {}).items()]
        taken = self._opened(path, begin) if storages and self._has_room(holes) else None
        if taken is not None:
            if is_open:
                stream.flush()
            self._take(taken, holes)
        elif storages is None or storages:
            if is_open:
                stream.seek(begin)  # what was written there is shorter than the whole archive
            native(obj, f)

    # ---- safetensors

    def save_file(
        self, native: Callable[..., None], tensors: dict[str, Any], filename: Any, metadata: Any = None
    ) -> None:
        """Stand in for ``safetensors.torch.save_file``."""
        path = self._relative(filename)
        if path is not None:
            self._forget(path, 0)
        if path is None or not _is_plain(tensors):
            native(tensors, filename, metadata=metadata)
            return
        header, offsets = safetensors_header(tensors, metadata)
        filled = {name: each for name, each in tensors.items() if each.numel()}
        holes = [_Hole(len(header) + offsets[name], each.detach(), _size(each)) for name, each in filled.items()]
        end = len(header) + sum(each.bytes for each in holes)
        fits = self._has_room(holes)
        taken = self._captured(path, fill.create_with_hole(Path(filename), header, end)) if fits else None
        if taken is None:
            native(tensors, filename, metadata=metadata)
        else:
            self._take(taken, holes)

    # ---- Both

    def _forget(self, path: Path, begin: int) -> None:
        """Let go of what was captured for a file from an offset on: it is written again."""
        for each in self.files:
            if each.path == path:
                each.cut(begin)
        self._close(lambda file: not file.pieces and not file.straight)

    def _relative(self, path: Any) -> Path | None:
        """Return a path relative to the checkpoint; ``None`` for what is not captured."""
        if threading.get_ident() != self._thread or not isinstance(path, str | os.PathLike):
            return None
        absolute = Path(os.path.abspath(path))
        return absolute.relative_to(self.directory) if absolute.is_relative_to(self.directory) else None

    def _owned(self, hole: _Hole) -> OwnedStorage | None:
        """Return what only optimizers change, where that is what fills a hole."""
        found = self.owned.get(hole.source.data_ptr()) if hole.source.device.type == "cpu" else None
        return found if found is not None and found.bytes == hole.bytes else None

    def _may_go_straight(self, owned: OwnedStorage | None) -> bool:
        return self.goes_straight and owned is not None and owned.may_wait

    def _has_room(self, holes: list[_Hole]) -> bool:
        copied = [each.bytes for each in holes if not self._may_go_straight(self._owned(each))]
        fits = self.arena.has_room(sum(copied), len(copied))
        self.lacking += 0 if fits else sum(copied)
        return fits

    def _opened(self, path: Path, begin: int) -> CapturedFile | None:
        """Return the file in which an archive begins here; see :meth:`_captured`."""
        known = [each for each in self.files if each.path == path and self._is_in_place(each)] if begin else []
        return known[-1] if known else self._captured(path, fill.open_to_fill(self.directory / path))

    def _captured(self, path: Path, descriptor: int) -> CapturedFile | None:
        """Return a file that is open now; ``None``, and close it, where too few descriptors would be left."""
        import resource

        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if most != resource.RLIM_INFINITY and descriptor >= most - _SPARE:  # it is the lowest that was free
            os.close(descriptor)
            return None
        self.files.append(CapturedFile(path, descriptor, [], {}))
        return self.files[-1]

    def _take(self, taken: CapturedFile, holes: list[_Hole]) -> None:
        """Fill the holes of a file later; what may not wait is copied now."""
        for hole in holes:
            owned = self._owned(hole)
            if owned is not None and self._may_go_straight(owned):
                owned.sample(wholly=self.wholly)
                taken.straight[hole.place] = owned
                continue
            offset = self.arena.reserve(hole.bytes)
            piece = Piece(hole.place, offset, hole.bytes)
            taken.pieces.append(piece)
            if owned is not None or hole.bytes < SMALLEST:  # it is kept: no other storage gets its address meanwhile
                self._copies[hole.source.data_ptr()] = piece, hole.source
            if owned is not None and owned.may_wait:
                owned.sample()
                self.later.append((offset, owned))
                continue
            held = hole.source.cpu()  # of what is on the CPU, itself
            self.arena.copy(offset, held.data_ptr(), hole.bytes)
            if owned is not None:
                self.now.append((offset, owned))


def _begin(place: int | Record) -> int:
    return place.begin if isinstance(place, Record) else place


def _stream(f: Any) -> Any:
    """Return the file to which ``torch.save`` writes, also where ``torch.distributed.checkpoint`` keeps it open."""
    return f.raw if type(f).__name__ == "NoCloseWriter" else f  # seam: torch 2.7-2.13


def _size(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


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

    strided = all(each.layout is torch.strided and each.is_contiguous() for each in tensors.values())
    held = [each for each in tensors.values() if each.numel()]
    own = {each.untyped_storage().data_ptr() for each in held} if strided else set()
    return strided and len(own) == len(held) > 0 and sys.byteorder == "little"
