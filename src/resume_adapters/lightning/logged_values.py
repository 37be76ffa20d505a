"""What was logged, as callbacks, schedulers and loggers read it, and what the running epoch has summed up so far.

The connector that holds it is private. Everything of it that the adapter touches is in this module;
``tests/lightning/test_seams.py`` checks each of it against the installed version.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from resume_adapters.lightning import epoch_sums
from resume_adapters.lightning.loops import BATCH, EPOCH, IN_EPOCH, Loops

Tree = dict[str, Any]


def capture(loops: Loops) -> Tree:
    """Return the logged values that callbacks and schedulers read, and what this epoch has summed up so far."""
    trainer, connector = loops.trainer, loops.trainer._logger_connector
    return {
        "callback": dict(trainer.callback_metrics),
        "logged": dict(connector._logged_metrics),
        "progress_bar": dict(connector._progress_bar_metrics),
        "epoch": epoch_sums.logged(loops.epoch._results),
        "first": connector._first_loop_iter,
        "hook": connector._current_fx,
        "torchmetrics": epoch_sums.metrics(trainer.lightning_module),
    }


def restore(loops: Loops, saved: Tree, moment: str) -> None:
    """Put back the logged values, and in the middle of an epoch its sums."""
    trainer, connector = loops.trainer, loops.trainer._logger_connector
    connector._callback_metrics.update(saved["callback"])
    connector._logged_metrics.update(saved["logged"])
    connector._progress_bar_metrics.update(saved["progress_bar"])
    if moment in IN_EPOCH:
        epoch_sums.log_again(loops.epoch._results, saved["epoch"], trainer)
        connector._first_loop_iter, connector._current_fx = saved["first"], saved["hook"]
    epoch_sums.set_metrics(trainer.lightning_module, saved["torchmetrics"])


def redistribute(loops: Loops, everyone: Sequence[Tree], rank: int, ranks: int) -> Tree:
    """Return what :func:`capture` would have returned here, of what it returned on other ranks.

    Raises:
        StateMismatch: a torchmetrics object keeps what cannot be divided among ranks.
    """
    module = loops.trainer.lightning_module
    return {
        **everyone[rank % len(everyone)],
        "epoch": epoch_sums.share_of_logged([each["epoch"] for each in everyone], rank, ranks),
        "torchmetrics": epoch_sums.share_of_metrics(module, [each["torchmetrics"] for each in everyone], rank),
    }


def row_due(loops: Loops, moment: str | None) -> Tree:
    """Return what the loggers will get of the batch, or of the epoch, once every callback has been called."""
    connector = loops.trainer._logger_connector
    if not loops.trainer.loggers or moment not in (BATCH, EPOCH):
        return {}
    if moment == BATCH and (loops.is_accumulating or not connector.should_update_logs):
        return {}
    return dict(connector.metrics["log"])
