"""What an epoch has summed up of the values that were logged, and of torchmetrics, when it is interrupted half-way."""

from __future__ import annotations

import builtins
import importlib
from typing import Any

from resume_adapters._lightning_framework import pl
from resume_adapters.errors import CheckpointDamaged

Tree = dict[str, Any]

_DESCRIBING: tuple[str, ...] = (
    "fx",
    "name",
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "enable_graph",
    "add_dataloader_idx",
)
_DESCRIBING += ("dataloader_idx", "metric_attribute")
_REDUCING = ("min", "max", "mean", "sum")
"""Functions by which Lightning sums up an epoch; no other is looked up by a name that was read from a checkpoint."""

_SUMMED = ("value", "cumulated_batch_size", "_forward_cache", "_update_count", "has_reset")


def logged(results: Any) -> list[Tree]:
    """Return what was logged so far in this epoch, value by value, in order."""
    return [{"key": key, **_describe(metric)} for key, metric in results.items() if metric.meta.sync.group is None]


def _describe(metric: Any) -> Tree:
    meta = metric.meta
    summed = _SUMMED if metric.is_tensor else ("_forward_cache", "_update_count", "has_reset")
    return {
        "meta": {name: getattr(meta, name) for name in _DESCRIBING},
        "reduce": [meta.reduce_fx.__name__, meta.reduce_fx.__module__ == builtins.__name__],
        "sync": {"_should": meta.sync.should, "rank_zero_only": meta.sync.rank_zero_only, "_op": meta.sync.op},
        "is_tensor": metric.is_tensor,
        "summed": {name: getattr(metric, name) for name in summed if hasattr(metric, name)},
    }


def log_again(results: Any, saved: list[Tree], trainer: Any) -> None:
    """Make an epoch's results what they were.

    Raises:
        CheckpointDamaged: what was saved is not what :func:`logged` returns.
    """
    # seam: lightning 2.6, the classes of logged values: nothing public can make one.
    kinds = importlib.import_module(f"{pl.__name__}.trainer.connectors.logger_connector.result")
    import torch

    for each in saved:
        name, is_builtin = each["reduce"]
        attributes = each["summed"].keys() - set(_SUMMED)
        if name not in _REDUCING or attributes:
            raise CheckpointDamaged(
                f"the logged value {each['key']!r} of the checkpoint is reduced by {name!r} and sets "
                f"{sorted(attributes)}; expected one of {', '.join(_REDUCING)}, and nothing else to be set. This "
                "package does not write that: resume from a checkpoint that you trust"
            )
        reduce = getattr(builtins if is_builtin and name != "mean" else torch, name)
        meta = kinds._Metadata(**each["meta"], reduce_fx=reduce)
        meta.sync = kinds._Sync(fn=trainer.strategy.reduce, **each["sync"])
        metric = kinds._ResultMetric(meta, each["is_tensor"])
        if not each["is_tensor"]:
            metric.value = trainer.lightning_module.get_submodule(each["meta"]["metric_attribute"])
        for attribute, value in each["summed"].items():
            setattr(metric, attribute, value)
        results[each["key"]] = metric


def metrics(module: Any) -> Tree:
    """Return the state of each torchmetrics object of a module, by name; it is no part of the weights."""
    return {
        name: {"state": metric.metric_state, "updates": metric._update_count}  # seam: torchmetrics 1.9
        for name, metric in _metrics(module)
    }


def set_metrics(module: Any, saved: Tree) -> None:
    """Put back what :func:`metrics` returned."""
    for name, metric in _metrics(module):
        if name in saved:
            for attribute in metric.metric_state.keys() & saved[name]["state"].keys():
                setattr(metric, attribute, saved[name]["state"][attribute])
            metric._update_count = saved[name]["updates"]
            metric._computed = None


def _metrics(module: Any) -> list[tuple[str, Any]]:
    from torchmetrics import Metric

    return [(name, each) for name, each in module.named_modules() if isinstance(each, Metric)]
