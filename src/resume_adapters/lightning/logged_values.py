"""What was logged: as callbacks, schedulers and loggers read it, as the running epoch sums it up, and in CSV files.

The connector that holds it is private. Everything of it that the adapter touches is in this module;
``tests/lightning/test_seams.py`` checks each of it against the installed version.
"""

from __future__ import annotations

import builtins
import csv
import functools
import importlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch

from resume_adapters.core.log import logger
from resume_adapters.core.state.comparison import first_difference
from resume_adapters.core.state.records import Record, Stored
from resume_adapters.core.storage.base import Storage
from resume_adapters.errors import CheckpointDamaged, StateMismatch
from resume_adapters.lightning.compat import pl
from resume_adapters.lightning.loops import Loops, SavePoint


@dataclass
class LoggedValues(Record):
    """The logged values of one rank.

    Attributes:
        callback: values that callbacks and schedulers read, by name.
        logged: values that the loggers got, by name.
        progress_bar: values that the progress bar shows, by name.
        epoch: what the epoch has summed up; see :func:`logged`.
        first_iteration: Lightning's own flag of the first batch of an epoch.
        hook: the hook that logged last.
        torchmetrics: what torchmetrics have summed up; see :func:`metrics`.
    """

    callback: dict[str, Any]
    logged: dict[str, Any]
    progress_bar: dict[str, Any]
    epoch: list[dict[str, Any]]
    first_iteration: Annotated[bool | None, Stored("first")]
    hook: str | None
    torchmetrics: dict[str, Any]


def capture(loops: Loops, point: SavePoint, start: Attributes) -> LoggedValues:
    """Capture the logged values that callbacks and schedulers read, and what this epoch has summed up so far.

    Args:
        start: what :func:`attributes` returned before the training.
    """
    results = {SavePoint.VALIDATION: loops.validation._results, SavePoint.EPOCH: loops.epoch._results}.get(point, {})
    trainer, connector = loops.trainer, loops.trainer._logger_connector
    return LoggedValues(
        callback=dict(trainer.callback_metrics),
        logged=dict(connector._logged_metrics),
        progress_bar=dict(connector._progress_bar_metrics),
        epoch=logged(loops.epoch._results),
        first_iteration=connector._first_loop_iter,
        hook=connector._current_fx,
        torchmetrics=metrics(
            trainer.lightning_module, start, [each.value for each in results.values() if not each.is_tensor]
        ),
    )


def restore(loops: Loops, saved: LoggedValues, point: SavePoint) -> None:
    """Restore the logged values, and in the middle of an epoch its sums."""
    trainer, connector = loops.trainer, loops.trainer._logger_connector
    connector._callback_metrics.update(saved.callback)
    connector._logged_metrics.update(saved.logged)
    connector._progress_bar_metrics.update(saved.progress_bar)
    if point.in_epoch:
        restore_logged(loops.epoch._results, saved.epoch, trainer)
        # Lightning resets its flag for a validation, and restores it once every callback has been called.
        is_reset = point is SavePoint.VALIDATION and saved.first_iteration is None
        connector._first_loop_iter = False if is_reset else saved.first_iteration
        connector._current_fx = saved.hook
    restore_metrics(trainer.lightning_module, saved.torchmetrics)


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
        epoch=share_of_logged([each.epoch for each in saved], rank, ranks),
        torchmetrics=share_of_metrics(module, [each.torchmetrics for each in saved], rank),
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
    for directory, each in _loggers(trainer).items():
        each.save()
        file = Path(each.experiment.metrics_file_path)
        if storage.is_file(file):
            found[directory] = storage.read(file).decode()
    return found


def restore_rows(trainer: Any, saved: dict[str, str], storage: Storage) -> None:
    """Restore what :func:`capture_rows` returned, for the loggers that have the same directory in this launch."""
    for directory, each in _loggers(trainer).items():
        if directory in saved:
            writer, rows = each.experiment, saved[directory]
            storage.write(Path(writer.metrics_file_path), rows.encode())
            header = next(csv.reader(rows.splitlines()), [])
            writer.metrics_keys.extend(name for name in header if name not in writer.metrics_keys)


def _loggers(trainer: Any) -> dict[str, Any]:
    loggers = trainer.loggers if trainer.is_global_zero else []
    local = [each for each in loggers if isinstance(each, pl.loggers.CSVLogger) and "://" not in each.log_dir]
    return {os.path.abspath(each.log_dir): each for each in local}


# ---- What an epoch has summed up so far

_META = (
    *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx"),
    *("dataloader_idx", "metric_attribute"),
)
"""What Lightning knows of a logged value, beside how it is reduced."""

_REDUCTIONS = ("min", "max", "mean", "sum")
"""Functions with which Lightning sums up an epoch; no other name in a checkpoint is looked up."""

_SUMMED = ("value", "cumulated_batch_size", "_forward_cache", "_update_count", "has_reset")


def logged(results: Any) -> list[dict[str, Any]]:
    """Capture what was logged so far in this epoch, value by value, in order."""
    return [{"key": key, **_describe(metric)} for key, metric in results.items() if metric.meta.sync.group is None]


def _describe(metric: Any) -> dict[str, Any]:
    meta = metric.meta
    summed = _SUMMED if metric.is_tensor else ("_forward_cache", "_update_count", "has_reset")
    return {
        "meta": {name: getattr(meta, name) for name in _META},
        "reduce": [meta.reduce_fx.__name__, meta.reduce_fx.__module__ == builtins.__name__],
        "sync": {"_should": meta.sync.should, "rank_zero_only": meta.sync.rank_zero_only, "_op": meta.sync.op},
        "is_tensor": metric.is_tensor,
        "summed": {name: getattr(metric, name) for name in summed if hasattr(metric, name)},
    }


def restore_logged(results: Any, saved: list[dict[str, Any]], trainer: Any) -> None:
    """Restore the results of an epoch.

    Raises:
        CheckpointDamaged: what was saved is not what :func:`logged` returns.
    """
    # seam: lightning 2.4-2.6, the classes of logged values: there is no public way to make one.
    classes = importlib.import_module(f"{pl.__name__}.trainer.connectors.logger_connector.result")
    for each in saved:
        name, is_builtin = each["reduce"]
        attributes = each["summed"].keys() - set(_SUMMED)
        if name not in _REDUCTIONS or attributes:
            raise CheckpointDamaged(
                f"the logged value {each['key']!r} of the checkpoint is reduced by {name!r} and sets "
                f"{sorted(attributes)}; expected one of {', '.join(_REDUCTIONS)}, and no other attribute. This package "
                "does not write that: resume from a checkpoint that you trust"
            )
        reduce = getattr(builtins if is_builtin and name != "mean" else torch, name)
        meta = classes._Metadata(**each["meta"], reduce_fx=reduce)
        meta.sync = classes._Sync(fn=trainer.strategy.reduce, **each["sync"])
        metric = classes._ResultMetric(meta, each["is_tensor"])
        if not each["is_tensor"]:
            metric.value = trainer.lightning_module.get_submodule(each["meta"]["metric_attribute"])
        for attribute, value in each["summed"].items():
            setattr(metric, attribute, value)
        results[each["key"]] = metric


def share_of_logged(saved: Sequence[list[dict[str, Any]]], rank: int, ranks: int) -> list[dict[str, Any]]:
    """Return a rank's share of what a different number of ranks has summed up; reduced, the shares give the same.

    Args:
        saved: what :func:`logged` returned on each rank that saved.
    """
    found = []
    for each in saved[rank % len(saved)]:
        first_only = each["sync"]["rank_zero_only"]
        if first_only and rank > 0:
            continue
        parts = [other["summed"] for of_rank in saved for other in of_rank if other["key"] == each["key"]]
        if each["is_tensor"] and each["meta"]["on_epoch"]:
            share = _share(each["reduce"][0], parts, rank, 1 if first_only else ranks)
            each = {**each, "summed": {**each["summed"], **share}}
        found.append(each)
    return found


def _share(reduction: str, parts: Sequence[dict[str, Any]], rank: int, ranks: int) -> dict[str, Any]:
    values = torch.stack([each["value"] for each in parts])
    if reduction in ("min", "max"):
        return {"value": values.min() if reduction == "min" else values.max()}
    if reduction == "sum":
        return {"value": values.sum() / ranks}
    counts = torch.stack([each["cumulated_batch_size"] for each in parts])
    total = int(counts.sum())
    count = total // ranks + (rank < total % ranks)
    return {"value": values.sum() * count / max(1, total), "cumulated_batch_size": counts[0].new_tensor(count)}


Attributes = dict[str, dict[str, Any]]
"""Numbers and tensors that torchmetrics objects hold beside their states, by the names of both."""


def attributes(module: Any) -> Attributes:
    """Return the numbers and tensors that torchmetrics objects hold beside their states: most are settings."""
    return {
        name: {
            attribute: _copied(value)
            for attribute, value in vars(metric).items()
            if attribute not in metric.metric_state.keys() | _of_every_metric()
            and (type(value) in (bool, int, float) or isinstance(value, torch.Tensor))
        }
        for name, metric in torchmetrics(module)
    }


@functools.cache
def _of_every_metric() -> frozenset[str]:
    from torchmetrics import Metric

    class Empty(Metric):
        def update(self) -> None: ...
        def compute(self) -> None: ...

    return frozenset(vars(Empty()))


def metrics(module: Any, start: Attributes, reset: Iterable[Any] = ()) -> dict[str, Any]:
    """Capture the state of each torchmetrics object of a module, by name; it is no part of the weights.

    Args:
        start: what :func:`attributes` returned before the training; what differs is state too.
        reset: objects that Lightning resets when every callback has been called.
    """
    is_reset = {id(each) for each in reset}
    held = attributes(module)
    return {
        name: {  # seam: torchmetrics 1.9
            "state": {
                attribute: _copied(metric._defaults[attribute] if id(metric) in is_reset else value)
                for attribute, value in metric.metric_state.items()
            },
            "updates": 0 if id(metric) in is_reset else metric._update_count,
            "attributes": {
                attribute: value
                for attribute, value in held[name].items()
                if first_difference(start.get(name, {}).get(attribute), value) is not None
            },
        }
        for name, metric in torchmetrics(module)
    }


def _copied(value: Any) -> Any:
    # A sum is updated in place, and a list of values grows.
    if isinstance(value, list):
        return list(value)
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def restore_metrics(module: Any, saved: dict[str, Any]) -> None:
    """Restore what :func:`metrics` returned; name the objects that are not there, as those of a ``MetricTracker``."""
    live = attributes(module)
    if gone := sorted(saved.keys() - live.keys()):
        logger.warning("Not restored: the metrics %s (this launch has none there).", ", ".join(gone))
    for name, metric in torchmetrics(module):
        if name in saved:
            for attribute in metric.metric_state.keys() & saved[name]["state"].keys():
                setattr(metric, attribute, saved[name]["state"][attribute])
            others = saved[name].get("attributes", {})
            for attribute in live.get(name, {}).keys() & others.keys():
                setattr(metric, attribute, others[attribute])
            metric._update_count = saved[name]["updates"]
            metric._computed = None


def share_of_metrics(module: Any, saved: Sequence[dict[str, Any]], rank: int) -> dict[str, Any]:
    """Return a rank's share of the torchmetrics of a different number of ranks: rank 0 has the whole of a sum.

    Args:
        module: the module that has the torchmetrics.
        saved: what :func:`metrics` returned on each rank that saved.

    Raises:
        StateMismatch: a state is neither a sum nor a mean, a minimum or a maximum.
    """
    found = dict(saved[rank % len(saved)])
    for name, metric in torchmetrics(module):
        parts = [each[name] for each in saved if name in each]
        if not any(each["updates"] for each in parts):
            continue
        state = {}
        for attribute, reduce in metric._reductions.items():  # seam: torchmetrics 1.9
            if reduce is None or reduce.__name__ not in _REDUCED:
                raise StateMismatch(
                    f"the metric {name} keeps {attribute!r}, which cannot be divided among a different number of ranks "
                    "in the middle of an epoch: launch with as many ranks as before, or resume at the end of an epoch"
                )
            state[attribute] = _REDUCED[reduce.__name__]([each["state"][attribute] for each in parts], rank)
        found[name] = {**found[name], "state": state, "updates": max(each["updates"] for each in parts)}
    return found


_REDUCED: dict[str, Callable[[list[Any], int], Any]] = {
    "dim_zero_sum": lambda parts, rank: sum(parts) * (rank == 0),
    "dim_zero_mean": lambda parts, rank: sum(parts) / len(parts),
    "dim_zero_max": lambda parts, rank: functools.reduce(torch.maximum, parts),
    "dim_zero_min": lambda parts, rank: functools.reduce(torch.minimum, parts),
}
"""A rank's share of a state, by the function with which torchmetrics reduces it over the ranks."""


def torchmetrics(module: Any) -> list[tuple[str, Any]]:
    """Return the torchmetrics objects of a module, by name."""
    from torchmetrics import Metric

    return [(name, each) for name, each in module.named_modules() if isinstance(each, Metric)]
