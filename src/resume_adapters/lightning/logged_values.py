"""What was logged: as callbacks, schedulers and loggers read it, as the running epoch sums it up, and in CSV files.

The connector that holds it is private. Everything of it that the adapter touches is in this module;
``tests/lightning/test_seams.py`` checks each of it against the installed version.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from resume_adapters.core.state.records import Record, Stored
from resume_adapters.core.storage.base import Storage
from resume_adapters.lightning import epoch_sums
from resume_adapters.lightning.compat import pl
from resume_adapters.lightning.loops import Loops, SavePoint


@dataclass
class LoggedValues(Record):
    """The logged values of one rank.

    Attributes:
        callback: values that callbacks and schedulers read, by name.
        logged: values that the loggers got, by name.
        progress_bar: values that the progress bar shows, by name.
        epoch: what the epoch has summed up; see :func:`epoch_sums.logged`.
        first_iteration: Lightning's own flag of the first batch of an epoch.
        hook: the hook that logged last.
        torchmetrics: what torchmetrics have summed up; see :func:`epoch_sums.metrics`.
    """

    callback: dict[str, Any]
    logged: dict[str, Any]
    progress_bar: dict[str, Any]
    epoch: list[dict[str, Any]]
    first_iteration: Annotated[bool | None, Stored("first")]
    hook: str | None
    torchmetrics: dict[str, Any]


def capture(loops: Loops, point: SavePoint, start: epoch_sums.Attributes) -> LoggedValues:
    """Capture the logged values that callbacks and schedulers read, and what this epoch has summed up so far.

    Args:
        start: what :func:`epoch_sums.attributes` returned before the training.
    """
    results = {SavePoint.VALIDATION: loops.validation._results, SavePoint.EPOCH: loops.epoch._results}.get(point, {})
    trainer, connector = loops.trainer, loops.trainer._logger_connector
    return LoggedValues(
        callback=dict(trainer.callback_metrics),
        logged=dict(connector._logged_metrics),
        progress_bar=dict(connector._progress_bar_metrics),
        epoch=epoch_sums.logged(loops.epoch._results),
        first_iteration=connector._first_loop_iter,
        hook=connector._current_fx,
        torchmetrics=epoch_sums.metrics(trainer.lightning_module, start, epoch_sums.logged_objects(results)),
    )


def restore(loops: Loops, saved: LoggedValues, point: SavePoint) -> None:
    """Restore the logged values, and in the middle of an epoch its sums."""
    trainer, connector = loops.trainer, loops.trainer._logger_connector
    connector._callback_metrics.update(saved.callback)
    connector._logged_metrics.update(saved.logged)
    connector._progress_bar_metrics.update(saved.progress_bar)
    if point.in_epoch:
        epoch_sums.restore_logged(loops.epoch._results, saved.epoch, trainer)
        # Lightning resets its flag for a validation, and restores it once every callback has been called.
        is_reset = point is SavePoint.VALIDATION and saved.first_iteration is None
        connector._first_loop_iter = False if is_reset else saved.first_iteration
        connector._current_fx = saved.hook
    epoch_sums.restore_metrics(trainer.lightning_module, saved.torchmetrics)


def redistribute(loops: Loops, saved: Sequence[LoggedValues], rank: int, ranks: int) -> LoggedValues:
    """Return what this rank would have captured, from what a different number of ranks captured.

    Args:
        saved: what :func:`capture` returned on each rank that saved.

    Raises:
        StateMismatch: a state of torchmetrics cannot be divided among ranks.
    """
    module = loops.trainer.lightning_module
    return replace(
        saved[rank % len(saved)],
        epoch=epoch_sums.share_of_logged([each.epoch for each in saved], rank, ranks),
        torchmetrics=epoch_sums.share_of_metrics(module, [each.torchmetrics for each in saved], rank),
    )


def pending_row(loops: Loops, point: SavePoint) -> dict[str, Any]:
    """Return what the loggers will get of the batch, or of the epoch, once every callback has been called."""
    connector = loops.trainer._logger_connector
    if not loops.trainer.loggers or point not in (SavePoint.BATCH, SavePoint.EPOCH):
        return {}
    if point is SavePoint.BATCH and (loops.is_accumulating or not connector.should_update_logs):
        return {}
    return dict(connector.metrics["log"])


def capture_rows(trainer: Any, storage: Storage) -> dict[str, str]:
    """Return the rows that each CSVLogger has written, by its directory, after it has written those in memory.

    Only rank zero logs. A launch with the same version deletes those of the launch before it.

    Args:
        storage: where to read.
    """
    found = {}
    for directory, logger in _loggers(trainer).items():
        logger.save()
        file = Path(logger.experiment.metrics_file_path)
        if storage.is_file(file):
            found[directory] = storage.read(file).decode()
    return found


def restore_rows(trainer: Any, saved: dict[str, str], storage: Storage) -> None:
    """Restore what :func:`capture_rows` returned, for the loggers that have the same directory in this launch."""
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
