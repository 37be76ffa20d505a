"""What an epoch has summed up of the values that were logged, and of torchmetrics, when it is interrupted half-way."""

from __future__ import annotations

import builtins
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from resume_adapters.errors import CheckpointDamaged, StateMismatch
from resume_adapters.lightning.compat import pl

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
    # seam: lightning 2.4-2.6, the classes of logged values: nothing public can make one.
    kinds = importlib.import_module(f"{pl.__name__}.trainer.connectors.logger_connector.result")
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


def share_of_logged(everyone: Sequence[list[Tree]], rank: int, ranks: int) -> list[Tree]:
    """Return a rank's share of what other ranks have summed up, so that all shares together say what those said.

    Args:
        everyone: what :func:`logged` returned on each rank that saved.
        rank: this rank.
        ranks: number of ranks here.
    """
    found = []
    for each in everyone[rank % len(everyone)]:
        alone = each["sync"]["rank_zero_only"]
        if alone and rank > 0:
            continue
        parts = [other["summed"] for of_rank in everyone for other in of_rank if other["key"] == each["key"]]
        if each["is_tensor"] and each["meta"]["on_epoch"]:
            share = _share(each["reduce"][0], parts, rank, 1 if alone else ranks)
            each = {**each, "summed": {**each["summed"], **share}}
        found.append(each)
    return found


def _share(reduction: str, parts: Sequence[Tree], rank: int, ranks: int) -> Tree:
    values = torch.stack([each["value"] for each in parts])
    if reduction in ("min", "max"):
        return {"value": values.min() if reduction == "min" else values.max()}
    if reduction == "sum":
        return {"value": values.sum() / ranks}
    counts = torch.stack([each["cumulated_batch_size"] for each in parts])
    total = int(counts.sum())
    count = total // ranks + (rank < total % ranks)
    return {"value": values.sum() * count / max(1, total), "cumulated_batch_size": counts[0].new_tensor(count)}


def metrics(module: Any) -> Tree:
    """Return the state of each torchmetrics object of a module, by name; it is no part of the weights."""
    return {
        name: {  # seam: torchmetrics 1.9
            "state": {attribute: _copied(value) for attribute, value in metric.metric_state.items()},
            "updates": metric._update_count,
        }
        for name, metric in _metrics(module)
    }


def _copied(value: Any) -> Any:
    # What is summed up goes on in place; what is collected is a list that grows.
    return list(value) if isinstance(value, list) else value.detach().clone()


def set_metrics(module: Any, saved: Tree) -> None:
    """Put back what :func:`metrics` returned."""
    for name, metric in _metrics(module):
        if name in saved:
            for attribute in metric.metric_state.keys() & saved[name]["state"].keys():
                setattr(metric, attribute, saved[name]["state"][attribute])
            metric._update_count = saved[name]["updates"]
            metric._computed = None


def share_of_metrics(module: Any, everyone: Sequence[Tree], rank: int) -> Tree:
    """Return a rank's share of the torchmetrics of other ranks: of a sum, the first has all and the others nothing.

    Raises:
        StateMismatch: a state of them is neither a sum nor a mean, a least or a greatest value.
    """
    found = dict(everyone[rank % len(everyone)])
    for name, metric in _metrics(module):
        saved = [each[name] for each in everyone if name in each]
        if not any(each["updates"] for each in saved):
            continue
        state = {}
        for attribute, reduce in metric._reductions.items():  # seam: torchmetrics 1.9
            parts = [each["state"][attribute] for each in saved]
            if reduce is None or reduce.__name__ not in _REDUCED:
                raise StateMismatch(
                    f"the metric {name} keeps {attribute!r}, which cannot be divided among another number of ranks in "
                    "the middle of an epoch: launch with as many ranks as before, or go on from the end of an epoch"
                )
            state[attribute] = _REDUCED[reduce.__name__](parts, rank)
        found[name] = {**found[name], "state": state, "updates": max(each["updates"] for each in saved)}
    return found


_REDUCED: dict[str, Callable[[list[Any], int], Any]] = {
    "dim_zero_sum": lambda parts, rank: sum(parts) * (rank == 0),
    "dim_zero_mean": lambda parts, rank: sum(parts) / len(parts),
    "dim_zero_max": lambda parts, rank: functools.reduce(torch.maximum, parts),
    "dim_zero_min": lambda parts, rank: functools.reduce(torch.minimum, parts),
}
"""By the function with which torchmetrics puts a state of all ranks together, what each of other ranks is to hold."""


def _metrics(module: Any) -> list[tuple[str, Any]]:
    from torchmetrics import Metric

    return [(name, each) for name, each in module.named_modules() if isinstance(each, Metric)]
