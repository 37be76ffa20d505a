"""Each private seam of the installed versions: a clear failure here when a release moves one."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import transformers.trainer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import Trainer

from resume_adapters import hf
from resume_adapters.core import loader

import contract

METHODS: dict[str, list[str]] = {
    "train": ["self", "resume_from_checkpoint", "trial", "ignore_keys_for_eval"],
    "get_train_dataloader": ["self"],
    "get_eval_dataloader": ["self", "eval_dataset"],
    "_load_from_checkpoint": ["self", "resume_from_checkpoint", "model"],
    "_init_training_state": [
        "self",
        "max_steps",
        "num_update_steps_per_epoch",
        "num_train_epochs",
        "resume_from_checkpoint",
        "trial",
    ],
    "_load_rng_state": ["self", "checkpoint"],
    "get_batch_samples": ["self", "epoch_iterator", "num_batches", "device"],
    "_prepare_for_training": ["self", "max_steps", "train_dataloader", "resume_from_checkpoint"],
    "_load_optimizer_and_scheduler": ["self", "checkpoint"],
    "_save_checkpoint": ["self", "model", "trial"],
    "_finalize_training": ["self", "trial", "num_train_samples", "start_time"],
    "_load_best_model": ["self"],
    "_evaluate": ["self", "trial", "ignore_keys_for_eval", "skip_scheduler"],
    "_maybe_log_save_evaluate": [
        "self",
        "tr_loss",
        "grad_norm",
        "model",
        "trial",
        "epoch",
        "ignore_keys_for_eval",
        "start_time",
        "learning_rate",
    ],
    "_run_epoch": [
        "self",
        "model",
        "epoch",
        "train_dataloader",
        "steps_in_epoch",
        "num_update_steps_per_epoch",
        "trial",
        "ignore_keys_for_eval",
        "start_time",
        "resume_from_checkpoint",
        "epochs_trained",
        "steps_trained_in_current_epoch",
    ],
}


def test_an_older_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    contract.older_framework_is_refused(hf, transformers, monkeypatch)


@pytest.mark.parametrize("name", METHODS)
def test_the_trainer_has_the_method_as_it_is_overridden(name: str) -> None:
    parameters = list(inspect.signature(inspect.unwrap(getattr(Trainer, name))).parameters)
    assert parameters == METHODS[name], f"Trainer.{name} takes other arguments in {transformers.__version__}"


@pytest.mark.parametrize("name", ["skip_first_batches", "rotate_checkpoints", "sort_checkpoints"])
def test_the_trainer_calls_the_function_by_its_module_name(name: str) -> None:
    assert callable(getattr(transformers.trainer, name))
    source = inspect.getsource(Trainer)
    assert f" {name}(" in source, f"the Trainer of {transformers.__version__} no longer calls {name}"


def test_the_order_of_a_save_and_a_resume() -> None:
    """What is set before and after the events and methods that the adapter stands in."""
    loop, epoch = inspect.getsource(Trainer._inner_training_loop), inspect.getsource(Trainer._run_epoch)
    for earlier, later in (
        ("self.get_train_dataloader()", "self._init_training_state("),
        ("self._init_training_state(", "self._prepare_for_training("),
        ("self._tr_loss =", "on_train_begin("),
        ("self._globalstep_last_logged =", "on_train_begin("),
    ):
        assert 0 <= loop.index(earlier) < loop.index(later)
    if "_initial_global_step" in inspect.getsource(Trainer):
        assert loop.index("self._initial_global_step =") < loop.index("on_train_begin(")
    for earlier, later in (
        ("skip_first_batches(", "set_epoch("),
        ("set_epoch(epoch)", "iter(train_dataloader)"),
        ("self.get_batch_samples(", "self.training_step("),
    ):
        assert 0 <= epoch.index(earlier) < epoch.rindex(later)


def test_the_loader_takes_its_indices_from_the_index_sampler() -> None:
    """A watched loader is asked for ``_index_sampler`` when a pass begins, and stays a loader of its class."""
    plain = DataLoader(list(range(8)), batch_size=2)
    watch = loader.watch(plain)
    assert isinstance(plain, DataLoader) and loader.watch(plain) is watch
    assert [batch.tolist() for batch in plain] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert watch.fetched == 4 and watch.exhausted
    assert watch.position(2)["sampler"] is not None


def test_ddp_has_the_reducer_that_buckets_are_replayed_through() -> None:
    reducer: Any = torch.distributed.Reducer
    assert hasattr(reducer, "prepare_for_backward") and hasattr(reducer, "_rebuild_buckets")
    assert "self.reducer" in inspect.getsource(DistributedDataParallel)
