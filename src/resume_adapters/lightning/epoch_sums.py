"""What an epoch has summed up so far of the logged values and of torchmetrics."""

from __future__ import annotations

import builtins
import functools
import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from resume_adapters.core.log import logger
from resume_adapters.errors import CheckpointDamaged, StateMismatch
from resume_adapters.lightning.compat import pl

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
                if not _is_equal(value, start.get(name, {}).get(attribute))
            },
        }
        for name, metric in torchmetrics(module)
    }


def logged_objects(results: Any) -> list[Any]:
    """Return the torchmetrics objects among what was logged."""
    return [each.value for each in results.values() if not each.is_tensor]


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


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
