"""What is read back of an epoch's sums: a checkpoint is data, whatever names are in it."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection

from resume_adapters import _lightning_sums as sums
from resume_adapters.errors import CheckpointDamaged


def logged(**options: Any) -> list[dict[str, Any]]:
    """Return what is saved of one logged value."""
    results = _ResultCollection(training=True)
    results.log("training_step", "loss", torch.tensor(2.0), on_step=False, on_epoch=True, batch_size=4, **options)
    return sums.logged(results)


@pytest.mark.parametrize("reduce", ["min", "max", "mean", "sum", min, max, sum, torch.mean])
def test_each_reduction_comes_back(reduce: Any) -> None:
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, barebones=True)
    again = _ResultCollection(training=True)
    saved = logged(reduce_fx=reduce)
    sums.log_again(again, saved, trainer)
    assert sums.logged(again) == saved
    assert again["training_step.loss"].meta.reduce_fx is (getattr(torch, reduce) if isinstance(reduce, str) else reduce)


@pytest.mark.parametrize("reduce", [["exec", True], ["__import__", True], ["load", False], ["mean.__call__", False]])
def test_no_other_function_is_looked_up(reduce: list[Any]) -> None:
    """A name that someone wrote into a checkpoint must not become a function that is called with its data."""
    with pytest.raises(CheckpointDamaged, match=f"loss' of the checkpoint is reduced by '{reduce[0]}'"):
        sums.log_again({}, [{**logged()[0], "reduce": reduce}], None)


def test_no_other_attribute_is_set() -> None:
    saved = logged()[0]
    with pytest.raises(CheckpointDamaged, match="'compute'"):
        sums.log_again({}, [{**saved, "summed": {**saved["summed"], "compute": torch.tensor(0)}}], None)
