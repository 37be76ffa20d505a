"""Is there room for the checkpoints to come? A new one is written before an older one is removed."""

from __future__ import annotations

from pathlib import Path

from resume_adapters.core.log import logger
from resume_adapters.core.storage.base import Storage

_CHECKPOINTS = 2
"""How many checkpoints of the known size there should be room for."""


def format_bytes(count: int) -> str:
    """Format a number of bytes with three digits and a decimal unit, for example ``1.42 GB``."""
    value, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        del units[0]
    return f"{count} B" if units[0] == "B" else f"{value:.3g} {units[0]}"


def warn_if_short(storage: Storage, directory: Path, size: int) -> None:
    """Warn where there is no room for two more checkpoints.

    Args:
        storage: the file operations.
        directory: the run directory.
        size: bytes of a checkpoint, as the last one had.
    """
    free = storage.free_bytes(directory)
    if free < _CHECKPOINTS * size:
        logger.warning(
            "%s has %s free, and a checkpoint takes %s: expected room for two (%s), since a new one is written before "
            "an older one is removed. Free space, or a save may fail.",
            directory,
            format_bytes(free),
            format_bytes(size),
            format_bytes(_CHECKPOINTS * size),
        )
