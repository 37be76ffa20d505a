"""Read what a checkpoint holds, value by value, in bounded memory and without running code from it.

The values of a file have names; tensors are read later, a piece at a time. The libraries of the formats map files into
memory. What has been read of a mapped file counts as memory until the file is closed, so it is opened again after a
while.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from resume_adapters.core.checkpoint import layout, native_parts
from resume_adapters.core.checkpoint.manifest import Manifest
from resume_adapters.core.checkpoint.native_parts import PAYLOAD, Item, companion
from resume_adapters.core.state import encoding, safe_load
from resume_adapters.core.state.stand_ins import Opaque, standing_in
from resume_adapters.core.storage.base import Storage

if TYPE_CHECKING:
    import torch

_PIECE = 1 << 20
"""Elements of a tensor that are compared at a time."""

_WINDOW = 64 << 20
"""Bytes of a file that are read before it is opened again."""


class Stored(NamedTuple):
    """A tensor that is not read yet.

    Attributes:
        key: the key, or the keys, under which its file has it.
    """

    key: Any


class Digest(NamedTuple):
    """The content of a file that cannot be read value by value.

    Attributes:
        digest: its digest.
        reason: why it cannot be read.
    """

    digest: str
    reason: str


class Located(NamedTuple):
    """A value and where it was found.

    Attributes:
        file: path of the file in the checkpoint.
        value: the value, a :class:`Stored` tensor, or a :class:`Digest`.
    """

    file: str
    value: Any


class _File(Protocol):
    def values(self) -> Iterator[tuple[tuple[Any, ...], Any]]:
        """Yield each value after the keys that lead to it."""

    def tensor(self, key: Any) -> torch.Tensor:
        """Return a tensor, mapped where the format allows it."""


class Contents:
    """The values of one checkpoint.

    Args:
        storage: where to read.
        checkpoint: the checkpoint; not a link.
        manifest: its manifest; ``None`` where it has none.
    """

    def __init__(self, storage: Storage, checkpoint: Path, manifest: Manifest | None) -> None:
        self._storage = storage
        self.checkpoint = checkpoint
        self.manifest = manifest
        self.files = dict(self._find_files())
        self._entries = {entry.path: entry for entry in manifest.files} if manifest else {}
        self._open: tuple[str, _File] | None = None
        self._read = 0

    def known_digest(self, file: str) -> str | None:
        """Return the digest that the manifest has for a file, if the file has the manifest's size."""
        entry = self._entries.get(self.checkpoint.name if file == PAYLOAD else file)
        if entry is None or entry.bytes != self._storage.size(self.files[file]):
            return None
        return entry.digest

    def index(self, skipped: frozenset[str]) -> dict[Item, Located]:
        """Return every value of the files, and of the manifest, by what it is.

        Args:
            skipped: files that are not read.
        """
        found: dict[Item, Located] = {}
        for file in [name for name in self.files if name not in skipped]:
            if file.endswith(".safetensors") and companion(file) in self.files:
                continue  # read with the JSON file that names its tensors
            for path, value in self._values_of(file):
                item = native_parts.item(file, tuple(map(self._relative, path)))
                item = item._replace(where=file) if item in found else item
                found[item] = Located(file, self._relative(value))
        if self.manifest is not None:
            facts = {key: value for key, value in msgspec.to_builtins(self.manifest).items() if key != "files"}
            for path, value in _leaves(facts):
                found[native_parts.item("resume/manifest.json", path)] = Located("resume/manifest.json", value)
        return found

    def form(self, located: Located) -> str:
        """Return the dtype and shape of a tensor."""
        tensor = self._opened(located.file).tensor(located.value.key)
        return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"

    def pieces(self, located: Located) -> Iterator[torch.Tensor]:
        """Yield a tensor's elements, flat, a piece at a time; let go of a piece before asking for the next."""
        tensor = _flat(self._opened(located.file).tensor(located.value.key))
        for begin in range(0, tensor.numel(), _PIECE):
            if self._read >= _WINDOW:
                del tensor
                self._open = None
                tensor = _flat(self._opened(located.file).tensor(located.value.key))
            piece = tensor[begin : begin + _PIECE]
            self._read += piece.numel() * piece.element_size()
            yield piece

    def _opened(self, file: str) -> _File:
        """Return a file; at most one is open."""
        if self._open is None or self._open[0] != file:
            self._open = None
            self._open, self._read = (file, self._open_file(file)), 0
        return self._open[1]

    def _values_of(self, file: str) -> Iterator[tuple[tuple[Any, ...], Any]]:
        """Yield the values of a file; one digest where it cannot be read."""
        try:
            yield from list(self._opened(file).values())
        except _UNREADABLE as error:
            _, digest = self._storage.digest(self.files[file])
            yield ((), Digest(digest, str(error).partition("\n")[0]))

    def _open_file(self, file: str) -> _File:
        path, suffix = self.files[file], Path(file).suffix
        if native_parts.part_of_file(file) == "files" or suffix not in (".json", *_FORMATS):
            raise ValueError("its format is not one that is read value by value")
        if suffix == ".json":
            return _JsonFile(self._storage.read(path), self.files.get(companion(file)))
        return _FORMATS[suffix](path)

    def _find_files(self) -> Iterator[tuple[str, Path]]:
        if self._storage.is_file(self.checkpoint) and not layout.has_sidecar(self._storage, self.checkpoint):
            yield PAYLOAD, self.checkpoint
            return
        content = layout.payload(self._storage, self.checkpoint)
        for path, file in layout.files(self._storage, self.checkpoint):
            yield (PAYLOAD if file == content else path.as_posix()), file

    def _relative(self, value: Any) -> Any:
        """Remove the run directory from the beginning of a text that is a path: another one may hold the same run."""
        if not isinstance(value, str) or "/" not in value:
            return value
        directory = self.checkpoint.parent.parts
        for begin in range(len(directory)):
            prefix = "/".join(directory[begin:]).replace("//", "/", 1) + "/"
            if value.startswith(prefix):
                return value.removeprefix(prefix)
        return value


_UNREADABLE = (
    OSError, RuntimeError, ValueError, KeyError, EOFError, TypeError, IndexError, AssertionError,
    pickle.UnpicklingError, zipfile.BadZipFile, msgspec.MsgspecError,
)  # fmt: skip
"""What the readers of torch's pickles and of JSON raise for a file that is torn, or of another format."""


# ---- The formats


class _Safetensors:
    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            self._handle: Any = safe_open(path, framework="pt")
        except SafetensorError as error:
            raise ValueError(str(error)) from error

    def values(self) -> Iterator[tuple[tuple[Any, ...], Any]]:
        for name in self._handle.keys():  # noqa: SIM118  # it is no mapping
            yield (name,), Stored(name)

    def tensor(self, key: Any) -> Any:
        return self._handle.get_tensor(key)


class _JsonFile:
    """A JSON file, and the file of the tensors that it names if it is a part of this package."""

    def __init__(self, document: bytes, tensors: Path | None) -> None:
        self._document = document
        self._tensors = None if tensors is None else _Safetensors(tensors)

    def values(self) -> Iterator[tuple[tuple[Any, ...], Any]]:
        known = set() if self._tensors is None else {key for (key,), _ in self._tensors.values()}
        for path, value in _leaves(_with_names(encoding.outline(self._document))):
            if isinstance(value, encoding.Reference) and value.key not in known:
                raise ValueError(f"it names the tensor {value.key}, which is missing")
            yield path, Stored(value.key) if isinstance(value, encoding.Reference) else value

    def tensor(self, key: Any) -> Any:
        assert self._tensors is not None, "without tensors, values() names none"
        return self._tensors.tensor(key)


class _TorchFile:
    """A file of ``torch.save``. Objects of classes that torch does not allow are read as their state."""

    def __init__(self, path: Path) -> None:
        import torch

        with safe_load.data_only(safe_load.numpy_classes()), standing_in():
            self._tree = _with_names(torch.load(path, map_location="cpu", weights_only=True, mmap=True))

    def values(self) -> Iterator[tuple[tuple[Any, ...], Any]]:
        for path, value in _leaves(self._tree):
            yield path, Stored(path) if _is_tensor(value) else value

    def tensor(self, key: Any) -> Any:
        import torch

        value = self._tree
        for each in key:
            value = _children(value)[each]
        return value if isinstance(value, torch.Tensor) else torch.from_numpy(value.copy())


_FORMATS: Mapping[str, Callable[[Path], _File]] = {
    ".safetensors": _Safetensors,
    **dict.fromkeys((".pt", ".pth", ".bin", ".pkl", ".ckpt"), _TorchFile),
}


# ---- Trees


def _is_tensor(value: Any) -> bool:
    import numpy as np
    import torch

    is_array = isinstance(value, np.ndarray) and value.dtype.kind in "biufc"
    return isinstance(value, torch.Tensor) or is_array


def _children(value: Any) -> Mapping[Any, Any]:
    """Return what a value contains, by key; empty for one that contains nothing."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, Opaque):
        state = value.state if isinstance(value.state, Mapping) else {"state": value.state}
        of_state = state if value.state is not None else {}
        return {**dict(enumerate([*value.arguments, *value.items])), **value.entries, **of_state}
    if isinstance(value, list | tuple) and any(isinstance(each, _CONTAINERS) or _is_tensor(each) for each in value):
        return dict(enumerate(value))
    return {}


_CONTAINERS = (Mapping, list, tuple, Opaque)


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield what a tree contains, each after the keys that lead to it; a list of plain values is one value."""
    children = {} if isinstance(value, encoding.Reference) else _children(value)
    if not children:
        yield path, type(value).__name__ if isinstance(value, Opaque) else value
    for key, child in children.items():
        yield from _leaves(child, (*path, key))


def _with_names(tree: Any) -> Any:
    """Replace the indices in an optimizer's state by the names of the parameters, where the optimizer has them."""
    if isinstance(tree, list):
        return [_with_names(each) for each in tree]
    if not isinstance(tree, dict):
        return tree
    names = _parameter_names(tree.get("param_groups"))
    state = tree.get("state")
    if names and isinstance(state, dict):
        tree = {**tree, "state": {names.get(index, index): value for index, value in state.items()}}
    return {key: _with_names(value) for key, value in tree.items()}


def _parameter_names(groups: Any) -> dict[Any, str]:
    """Return the name of each parameter by its index in an optimizer's state dict."""
    found = [each for each in groups if isinstance(each, dict)] if isinstance(groups, list) else []
    return {
        index: name
        for group in found
        for index, name in zip(group.get("params", ()), group.get("param_names", ()), strict=False)
    }


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    return dense.detach().resolve_conj().resolve_neg().reshape(-1)
