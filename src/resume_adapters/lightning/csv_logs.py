"""The rows of Lightning's CSVLogger: a launch with the same version deletes those of the launch before it."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

from resume_adapters.core.storage.base import Storage
from resume_adapters.lightning.compat import pl


def capture(trainer: Any, storage: Storage) -> dict[str, str]:
    """Return the rows that each CSVLogger has written, by its directory, after it has written those in memory.

    Only rank zero logs.

    Args:
        trainer: the trainer.
        storage: where to read.
    """
    found = {}
    for directory, logger in _loggers(trainer).items():
        logger.save()
        file = Path(logger.experiment.metrics_file_path)
        if storage.is_file(file):
            found[directory] = storage.read(file).decode()
    return found


def restore(trainer: Any, saved: dict[str, str], storage: Storage) -> None:
    """Restore what :func:`capture` returned, for the loggers that have the same directory in this launch."""
    for directory, logger in _loggers(trainer).items():
        if directory in saved:
            writer, rows = logger.experiment, saved[directory]
            storage.write(Path(writer.metrics_file_path), rows.encode())
            header = next(csv.reader(rows.splitlines()), [])
            writer.metrics_keys.extend(name for name in header if name not in writer.metrics_keys)


def _loggers(trainer: Any) -> dict[str, Any]:
    loggers = trainer.loggers if trainer.is_global_zero else []
    local = [each for each in loggers if isinstance(each, pl.loggers.CSVLogger) and "://" not in each.log_dir]
    return {os.path.abspath(each.log_dir): each for each in local}
