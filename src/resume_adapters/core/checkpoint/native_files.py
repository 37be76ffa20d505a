"""Read and check the weight files of a framework. The libraries of their formats open them by path."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resume_adapters.errors import CheckpointDamaged

if TYPE_CHECKING:
    import torch


def read_weight_files(files: Iterable[Path]) -> dict[str, torch.Tensor]:
    """Read weight files: safetensors, or torch's own format with ``weights_only=True``."""
    import torch
    from safetensors.torch import load_file

    weights: dict[str, Any] = {}
    for file in files:
        if file.suffix == ".safetensors":
            weights.update(load_file(file))
        else:
            weights.update(torch.load(file, map_location="cpu", weights_only=True, mmap=True))
    return weights


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
    except (SafetensorError, zipfile.BadZipFile) as error:
        raise CheckpointDamaged(f"{file.name} is torn: {error}", path=file) from error
    if torn is not None:
        raise CheckpointDamaged(f"{file.name} is torn at {torn}", path=file)
