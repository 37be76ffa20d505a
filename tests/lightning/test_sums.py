"""What is read back of an epoch's sums: a checkpoint is data, whatever names are in it."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torchmetrics import CatMetric, MaxMetric, SumMetric

from resume_adapters.errors import CheckpointDamaged, StateMismatch
from resume_adapters.lightning import logged_values, strategies


def logged(**options: Any) -> list[dict[str, Any]]:
    """Return what is saved of one logged value."""
    results = _ResultCollection(training=True)
    results.log("training_step", "loss", torch.tensor(2.0), on_step=False, on_epoch=True, batch_size=4, **options)
    return logged_values.logged(results)


@pytest.mark.parametrize("reduce", ["min", "max", "mean", "sum", min, max, sum, torch.mean])
def test_each_reduction_comes_back(reduce: Any) -> None:
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, barebones=True)
    again = _ResultCollection(training=True)
    saved = logged(reduce_fx=reduce)
    logged_values.restore_logged(again, saved, trainer)
    assert logged_values.logged(again) == saved
    assert again["training_step.loss"].meta.reduce_fx is (getattr(torch, reduce) if isinstance(reduce, str) else reduce)


@pytest.mark.parametrize("reduce", [["exec", True], ["__import__", True], ["load", False], ["mean.__call__", False]])
def test_no_other_function_is_looked_up(reduce: list[Any]) -> None:
    """A name that someone wrote into a checkpoint must not become a function that is called with its data."""
    with pytest.raises(CheckpointDamaged, match=f"loss' of the checkpoint is reduced by '{reduce[0]}'"):
        logged_values.restore_logged({}, [{**logged()[0], "reduce": reduce}], None)


def test_no_other_attribute_is_set() -> None:
    saved = logged()[0]
    with pytest.raises(CheckpointDamaged, match="'compute'"):
        logged_values.restore_logged({}, [{**saved, "summed": {**saved["summed"], "compute": torch.tensor(0)}}], None)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("reduce", ["mean", "sum", "min", "max"])
def test_the_shares_of_other_ranks_say_together_what_was_said(reduce: str, ranks: int) -> None:
    """Two ranks saved: one saw 8 samples of loss 1, the other 4 of loss 4."""
    saved = []
    for value, size in ((1.0, 8), (4.0, 4)):
        results = _ResultCollection(training=True)
        options = {"on_step": False, "on_epoch": True, "reduce_fx": reduce, "batch_size": size}
        results.log("training_step", "loss", torch.tensor(value), **options)
        saved.append(logged_values.logged(results))
    shares = [logged_values.share_of_logged(saved, rank, ranks)[0]["summed"] for rank in range(ranks)]
    values = [float(each["value"]) for each in shares]
    if reduce == "mean":
        counts = [int(each["cumulated_batch_size"]) for each in shares]
        assert sum(counts) == 12 and sum(values) == pytest.approx(24)
        assert all(value / count == pytest.approx(2) for value, count in zip(values, counts, strict=True))
    else:
        found = {"sum": sum, "min": min, "max": max}[reduce](values)
        assert found == pytest.approx({"sum": 5.0, "min": 1.0, "max": 4.0}[reduce])


def test_a_metric_is_divided_or_refused() -> None:
    saved = []
    for value in (1.0, 5.0):
        module = torch.nn.ModuleDict({"sum": SumMetric(), "most": MaxMetric()})
        for metric in module.values():
            metric.update(value)
        saved.append(logged_values.metrics(module, {}))
    for rank, (total, most) in enumerate([(6.0, 5.0), (0.0, 5.0), (0.0, 5.0)]):
        share = logged_values.share_of_metrics(module, saved, rank)
        assert share["sum"]["state"]["sum_value"] == total and share["most"]["state"]["max_value"] == most
    kept = torch.nn.ModuleDict({"all": CatMetric()})
    kept["all"].update(1.0)
    with pytest.raises(StateMismatch, match="the metric all keeps 'value', which cannot be divided"):
        logged_values.share_of_metrics(kept, [logged_values.metrics(kept, {})] * 2, 0)


def test_gradients_of_an_unfinished_accumulation_are_averaged() -> None:
    everyone = [{"a": torch.tensor(1.0), "b": torch.tensor(4.0)}, {"a": torch.tensor(3.0)}]
    assert strategies.mean_gradients(everyone) == {"a": torch.tensor(2.0), "b": torch.tensor(2.0)}


def test_what_was_taken_of_a_metric_does_not_change_with_it() -> None:
    """A metric that a validation uses is saved as it was before, where a stop gives the validation up."""
    module = torch.nn.ModuleDict({"sum": SumMetric(), "cat": CatMetric()})
    for metric in module.values():
        metric.update(torch.tensor(2.0))
    taken = logged_values.metrics(module, logged_values.attributes(module))
    for metric in module.values():
        metric.update(torch.tensor(3.0))
    assert taken["sum"] == {"state": {"sum_value": torch.tensor(2.0)}, "updates": 1, "attributes": {}}
    assert taken["cat"] == {"state": {"value": [torch.tensor(2.0)]}, "updates": 1, "attributes": {}}


def test_a_metric_that_is_gone_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """A ``MetricTracker`` has more objects each time that it is incremented, and none in a new process."""
    saved = logged_values.metrics(torch.nn.ModuleDict({"a": SumMetric(), "b": SumMetric()}), {})
    logged_values.restore_metrics(torch.nn.ModuleDict({"b": SumMetric()}), saved)
    assert caplog.messages == ["Not restored: the metrics a (this launch has none there)."]
