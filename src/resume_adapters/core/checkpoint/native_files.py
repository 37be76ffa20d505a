"""Read and check the weight files of a framework. The libraries of their formats open them by path."""

from __future__ import annotations

import json
import pickle
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resume_adapters.core.checkpoint.files import CheckpointFiles
from resume_adapters.core.checkpoint.manifest import require_inside
from resume_adapters.errors import CheckpointDamaged

if TYPE_CHECKING:
    import torch


def weight_shards(files: CheckpointFiles, index: str) -> list[Path]:
    """Return the files that an index of sharded weights names.

    Args:
        files: those of the checkpoint.
        index: the path of the index in the checkpoint.

    Raises:
        CheckpointDamaged: it is not an index, or names a file that is not in the checkpoint.
    """
    try:
        shards = sorted({str(shard) for shard in json.loads(files.read(index))["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointDamaged(f"{index} is not an index of weights: {error}", path=files.checkpoint) from error
    for shard in shards:
        require_inside(shard, index)
        if files.find(shard) is None:
            raise CheckpointDamaged(
                f"{index} names {shard}, which is not in {files.checkpoint.name}", path=files.checkpoint
            )
    return [files.require(shard) for shard in shards]


def read_weight_files(files: Iterable[Path]) -> dict[str, torch.Tensor]:
    """Read weight files: safetensors, or torch's own format with ``weights_only=True``."""
    weights: dict[str, Any] = {}
    for file in files:
        weights.update(read_native(file))
    return weights


def read_native(file: Path) -> dict[str, Any]:
    """Read a dict from a file: safetensors, or torch's own format with ``weights_only=True``.

    Raises:
        CheckpointDamaged: it cannot be read, or not without running code from it.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except (SafetensorError, *UNREADABLE) as error:
        raise CheckpointDamaged(f"{file.name} cannot be read: {error}", path=file) from error
    if not isinstance(found, dict):
        raise CheckpointDamaged(f"{file.name} holds a {type(found).__name__}, expected a dict", path=file)
    return found


UNREADABLE = (
    *(pickle.UnpicklingError, zipfile.BadZipFile, OSError, RuntimeError, EOFError, ValueError, KeyError, IndexError),
    *(TypeError, AttributeError, OverflowError, MemoryError, AssertionError, RecursionError),
)
"""What ``torch.load`` raises where a file is not what ``torch.save`` wrote, or names code."""


def require_intact(file: Path) -> None:
    """Check that a file in the format of torch or of safetensors is complete, not that it is the right one.

    Raises:
        CheckpointDamaged: the file is truncated or changed.
    """
    from safetensors import SafetensorError, safe_open

    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt"):
                return
        with zipfile.ZipFile(file) as archive:
            torn = archive.testzip()
    except (SafetensorError, zipfile.BadZipFile, OSError, RuntimeError, ValueError, EOFError, zlib.error) as error:
        raise CheckpointDamaged(f"{file.name} is torn: {error}", path=file) from error
    if torn is not None:
        raise CheckpointDamaged(f"{file.name} is torn at {torn}", path=file)
