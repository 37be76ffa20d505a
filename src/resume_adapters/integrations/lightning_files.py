"""Under which of its names Lightning is used, and how its own plugin writes a file: for Lightning and for Fabric."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from resume_adapters.core.patching import replaced
from resume_adapters.core.storage.local import LocalStorage

asking: dict[str, None] = {}
"""The packages whose Trainers have asked for callbacks, by their names, in this order."""


def imported_or_installed(names: Collection[str]) -> str | None:
    """Return the name under which a package has asked for callbacks, or was imported first, else one installed.

    Args:
        names: the names of one package, of which several may be installed, that to take if none is imported first.
    """
    imported = [name for name, module in sys.modules.items() if name in names and module is not None]
    asked = [name for name in asking if name in names]
    installed = [name for name in names if importlib.util.find_spec(name.partition(".")[0]) is not None]
    return next(iter([*asked, *imported, *installed]), None)


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
