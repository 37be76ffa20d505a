"""What two checkpoints do not have alike: the names, dtypes, shapes and digests of tensors, and the values beside them.

Only what a resume restores counts: no settings, no paths, no times, and nothing of when or by whom it was saved. Files
are read as data, a tensor at a time; no code of a checkpoint is run.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from resume_adapters.core.checkpoint import layout
from resume_adapters.core.state import encoding, safe_load
from resume_adapters.core.state.stand_ins import Opaque, standing_in
from resume_adapters.core.storage.base import Storage

TORCH_FILES = (".pt", ".pth", ".bin", ".pkl", ".ckpt")
STATE_FILES = (".safetensors", ".distcp", *TORCH_FILES)
"""How the names of files end that have weights or an optimizer."""

_SETTINGS = re.compile(
    r"training_args\.bin|(.*_)?config\.json|.*\.index\.json|.*token.*|vocab.*|merges\.txt|README\.md|chat_template.*"
    r"|resume/trackers\..*"
)
"""Files of what a launch was given, and the runs of trackers."""

_SETTINGS_WITHIN = frozenset(
    {"hyper_parameters", "datamodule_hyper_parameters", "pytorch-lightning_version", "ds_config", "ds_version"}
)
_TIMES = re.compile(r"(.*_)?(seconds|elapsed|runtime|per_second)")
"""Keys of what a clock measured."""

_SHARD = re.compile(r"-\d+-of-\d+(?=\.)")
_LONGEST = 100
_UNREADABLE = (
    OSError, RuntimeError, ValueError, KeyError, EOFError, TypeError, IndexError, AssertionError,
    pickle.UnpicklingError, zipfile.BadZipFile, msgspec.MsgspecError,
)  # fmt: skip
"""What the readers raise for a file that is torn, or of another format."""


class Difference(NamedTuple):
    """A value that two checkpoints do not have alike: its file and its place there, and what each has; empty: none."""

    name: str
    a: str
    b: str


def differences(storage: Storage, a: Path, b: Path) -> list[Difference]:
    """Return what two checkpoints do not have alike, in the order of the files."""
    one, other = values(storage, a), values(storage, b)
    return [
        Difference(name, one.get(name, ""), other.get(name, ""))
        for name in dict.fromkeys([*one, *other])
        if one.get(name) != other.get(name)
    ]


def values(storage: Storage, checkpoint: Path) -> dict[str, str]:
    """Return every value that a resume restores, as text, by its file and its place there.

    The shards of a model are one file. A file that cannot be read value by value is one value: its digest.
    """
    found: dict[str, str] = {}
    for path, file in sorted(layout.files(storage, checkpoint)):
        name = path.as_posix()
        if _SETTINGS.fullmatch(name):
            continue
        where = "" if name == checkpoint.name else _SHARD.sub("", name)
        try:
            read = dict(_texts(_tree(storage, file), where, checkpoint.parent))
        except _UNREADABLE:
            read = {where: f"a file, digest {storage.digest(file)[1]}"}
        found |= read
    return found


def _tree(storage: Storage, file: Path) -> Any:
    """Return what a file holds; a file of the package has references in the place of tensors.

    Raises:
        ValueError: its format is not one that is read value by value; or the reader's own, see ``_UNREADABLE``.
    """
    if file.suffix == ".json":
        return encoding.outline(storage.read(file))
    if file.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(file, "pt") as handle:
            # One tensor is in memory at a time.
            return {key: _of_tensor(handle.get_tensor(key)) for key in handle.keys()}  # noqa: SIM118  # no mapping
    if file.suffix not in TORCH_FILES:
        raise ValueError(f"{file.name} is of another format")
    import torch

    with safe_load.data_only(safe_load.numpy_classes()), standing_in():
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)


def _texts(value: Any, where: str, directory: Path) -> Iterator[tuple[str, str]]:
    """Yield what a tree contains as text, each after its place; a list of plain values is one value."""
    children = _children(value)
    if not children:
        yield where, _text(value, directory)
    for key, child in children.items():
        if key not in _SETTINGS_WITHIN and not _TIMES.fullmatch(str(key)):
            place = _relative(str(key), directory)
            yield from _texts(child, f"{where}.{place}" if ": " in where else f"{where}: {place}", directory)


def _children(value: Any) -> Mapping[Any, Any]:
    """Return what a value contains, by key; empty for one that contains nothing."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, Opaque):
        state = value.state if isinstance(value.state, Mapping) else {"state": value.state}
        return {**dict(enumerate([*value.arguments, *value.items])), **value.entries, **state}
    is_nested = isinstance(value, list | tuple) and any(_is_tensor(each) or _children(each) for each in value)
    return dict(enumerate(value)) if is_nested else {}


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "shape")


def _text(value: Any, directory: Path) -> str:
    if _is_tensor(value):
        return _of_tensor(value)
    text = _relative(value, directory) if isinstance(value, str) else repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..., digest {encoding.digest_of(text)}"


def _of_tensor(tensor: Any) -> str:
    """Return dtype, shape and digest of a tensor or an array.

    Raises:
        ValueError: it has no digest.
    """
    digest = encoding.digest_of(tensor.to_dense() if getattr(tensor, "is_sparse", False) else tensor)
    if digest is None:
        raise ValueError(f"a tensor of {tensor.dtype} has no digest")
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}, digest {digest}"


def _relative(text: str, directory: Path) -> str:
    """Remove the run directory from the beginning of a text that is a path: another one may hold the same run."""
    for begin in range(len(directory.parts) if "/" in text else 0):
        prefix = str(Path(*directory.parts[begin:]))
        if f"{text}/".startswith(f"{prefix}/"):
            return text.removeprefix(prefix)
    return text
