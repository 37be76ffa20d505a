"""The index of torch's distributed checkpoints, ``.metadata``: a pickle, read through a list of allowed classes."""

from __future__ import annotations

import contextlib
import pickle
import posixpath
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from resume_adapters.core.checkpoint.files import CheckpointFiles
from resume_adapters.core.patching import replaced
from resume_adapters.core.state import safe_load
from resume_adapters.errors import CheckpointDamaged

NAME = ".metadata"

SHARD = re.compile(r"__(\d+)_\d+\.distcp")
"""A file of shards, with the rank that wrote it."""

_ALLOWED = {
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib._local", "PosixPath"),  # Python 3.13
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}
"""What an index consists of, beside dtypes: dataclasses, whose making runs no code of the file's choice."""


def owner(file: Path) -> int | None:
    """Return the rank in the name of a shard; ``None`` for any other file."""
    shard = SHARD.fullmatch(file.name)
    return int(shard[1]) if shard else None


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        import torch

        # vars(), not getattr(): torch imports submodules on attribute access, and the name comes from a file.
        dtype = vars(torch).get(name) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which does not belong in an index")
        return super().find_class(module, name)


def load(file: BinaryIO) -> Any:
    """Read an index.

    Raises:
        UnpicklingError: it names something that does not belong in an index, or is torn.
    """
    return _Unpickler(file).load()


def _indexes(files: CheckpointFiles) -> dict[str, Any]:
    """Read the indexes of a checkpoint, with torch's own reader: what they name are files of the checkpoint.

    Raises:
        CheckpointDamaged: one cannot be read, or loading it freely could run code; or it names another file.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    found: dict[str, Any] = {}
    for name in files.with_name(NAME):
        try:
            found[name] = FileSystemReader(files.require(name).parent).read_metadata()
            shards = found[name].storage_data or {}
            named = {posixpath.join(posixpath.dirname(name), each.relative_path) for each in shards.values()}
        except _MALFORMED as error:
            raise CheckpointDamaged(f"{name} cannot be read: {error}", path=files.checkpoint) from error
        for each in sorted(named):
            files.require(each)
    return found


_MALFORMED = (
    *(pickle.UnpicklingError, EOFError, ValueError, KeyError, IndexError, TypeError, AttributeError, ImportError),
    *(RecursionError, RuntimeError, MemoryError, OverflowError, AssertionError),
)
"""What Python's unpickler raises where the file is not what it wrote."""


@contextlib.contextmanager
def reading(files: CheckpointFiles) -> Iterator[dict[str, Any]]:
    """Return the context in which torch reads the indexes of a checkpoint through the list, and the rest as data.

    It is given the indexes by name.

    Raises:
        CheckpointDamaged: an index cannot be read, or loading it freely could run code; or torch could not load.
    """
    with safe_load.data_only(safe_load.data_classes()):
        if not files.with_name(NAME):
            yield {}
            return
        from torch.distributed.checkpoint import filesystem
        from torch.distributed.checkpoint.api import CheckpointException

        # seam: torch 2.4 to 2.13: FileSystemReader.read_metadata calls pickle.load; nothing else there reads pickles.
        listed = types.SimpleNamespace(**{**vars(pickle), "load": load})
        try:
            with replaced(filesystem, "pickle", listed):
                yield _indexes(files)
        except CheckpointException as error:
            found = f"{files.checkpoint.name} cannot be read by torch.distributed.checkpoint: {error}"
            raise CheckpointDamaged(found, path=files.checkpoint) from error
