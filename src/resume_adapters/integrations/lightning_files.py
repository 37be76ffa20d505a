"""How Lightning's own plugin writes a file, for Lightning and for Fabric, which share it."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

from resume_adapters.core.patching import replaced
from resume_adapters.core.storage.local import LocalStorage


def writing_directly(plugin: type) -> contextlib.AbstractContextManager[None]:
    """Return the context in which Lightning's own plugin writes a file where it belongs.

    By itself it writes one in memory first, another in ``TMPDIR``, and copies that.

    Args:
        plugin: Lightning's ``TorchCheckpointIO``.
    """
    return replaced(sys.modules[plugin.__module__], "_atomic_save", write)  # seam: lightning 2.4-2.6


def write(checkpoint: dict[str, Any], target: str | os.PathLike[str]) -> None:
    """Write a file as Lightning does: to an open one, whose name is not in the archive."""
    import torch

    LocalStorage().make_directory(Path(target).parent)
    with open(target, "wb") as file:
        torch.save(checkpoint, file)
