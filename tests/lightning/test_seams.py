"""Each private seam of the installed version: a clear failure here when a release moves one."""

from __future__ import annotations

import inspect
import re
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.fabric.strategies import model_parallel
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.utilities import combined_loader

from resume_adapters.lightning import compat
from resume_adapters.lightning.loops import Loops

import contract

METHODS: dict[tuple[Any, str], list[str]] = {
    (_CheckpointConnector, "resume_start"): ["self", "checkpoint_path"],
    (pl.Trainer, "save_checkpoint"): ["self", "filepath", "weights_only", "storage_options"],
    (_FitLoop, "_load_combined_loader_states"): ["self"],
    (_FitLoop, "run"): ["self"],
    (_FitLoop, "on_run_end"): ["self"],
    (_SignalConnector, "register_signal_handlers"): ["self"],
    (_SignalConnector, "teardown"): ["self"],
    (_TrainingEpochLoop, "advance"): ["self", "data_fetcher"],
    (_FitLoop, "on_advance_start"): ["self"],
    (_TrainingEpochLoop, "reset"): ["self"],
    (_TrainingEpochLoop, "_should_check_val_fx"): ["self", "data_fetcher"],
    (_TrainingEpochLoop, "update_lr_schedulers"): ["self", "interval", "update_plateau_schedulers"],
    (_EvaluationLoop, "setup_data"): ["self"],
    (ModelCheckpoint, "_ModelCheckpoint__resolve_ckpt_dir"): ["self", "trainer"],
}
LATER = {"resume_start": ["weights_only"]}
"""Parameters that came with a version after the oldest; they are never given."""


def test_an_older_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    contract.older_framework_is_refused(compat, pl, monkeypatch)


@pytest.mark.parametrize(("owner", "name"), METHODS, ids=lambda each: getattr(each, "__name__", each))
def test_the_method_is_as_it_is_replaced(owner: Any, name: str) -> None:
    parameters = [
        each for each in inspect.signature(getattr(owner, name)).parameters if each not in LATER.get(name, ())
    ]
    assert parameters == METHODS[owner, name], f"{owner.__name__}.{name} takes other arguments in {pl.__version__}"


ATTRIBUTES = {
    _FitLoop: ["_combined_loader", "_data_fetcher", "epoch_progress", "epoch_loop"],
    _TrainingEpochLoop: ["_batches_that_stepped", "_results", "val_loop", "batch_progress"],
    _EvaluationLoop: ["_combined_loader", "_has_run", "_seen_batches_per_dataloader"],
    LearningRateFinder: ["_early_exit", "_attr_name"],
    BatchSizeFinder: ["_early_exit", "_batch_arg_name"],
    SaveConfigCallback: ["overwrite"],
    _LoggerConnector: [
        "_callback_metrics",
        "_logged_metrics",
        "_progress_bar_metrics",
        "_first_loop_iter",
        "_current_fx",
    ],
    combined_loader.CombinedLoader: ["_iterator"],
    combined_loader._MaxSizeCycle: ["_consumed"],
    ModelCheckpoint: ["_last_global_step_saved", "_last_checkpoint_saved", "_last_time_checked"],
    DeepSpeedStrategy: ["load_full_weights"],
    FSDPStrategy: ["_state_dict_type"],
    ModelParallelStrategy: ["_save_distributed_checkpoint"],
}


@pytest.mark.parametrize("owner", ATTRIBUTES, ids=lambda each: each.__name__)
def test_the_object_has_what_is_read_and_written(owner: Any) -> None:
    source = inspect.getsource(owner.__init__)
    missing = [name for name in ATTRIBUTES[owner] if f"self.{name}" not in source]
    assert not missing, f"{owner.__name__} of {pl.__version__} has no {missing}"


def test_the_root_directory_is_read_where_it_is_set() -> None:
    assert "self._default_root_dir" in inspect.getsource(pl.Trainer.default_root_dir.fget)


def test_what_torch_does_not_read_is_known() -> None:
    """``torch.load`` can be made to read data only; FSDP's other reader cannot, and its files are read before."""
    assert "_lazy_load" in inspect.getsource(FSDPStrategy.load_checkpoint)
    fsdp2 = inspect.getsource(model_parallel._load_checkpoint)
    assert "torch.load(" in fsdp2 and "_lazy_load" not in fsdp2 and "pickle" not in fsdp2


def test_the_fit_loop_runs_as_it_is_repeated() -> None:
    """``Loops.run_from`` does what ``run`` does, from the middle on."""
    order = ["setup_data", "reset", "on_run_start", "on_advance_start", "advance", "on_advance_end", "on_run_end"]
    source = inspect.getsource(_FitLoop.run)
    found = [source.index(f"self.{name}(") for name in order]
    assert found == sorted(found), f"FitLoop.run of {pl.__version__} does its work in another order"


def test_counters_are_captured_as_their_own_method_says() -> None:
    trainer = pl.Trainer(logger=False)
    loops, epoch = Loops(trainer), trainer.fit_loop.epoch_loop
    for number, each in enumerate((epoch.batch_progress, epoch.scheduler_progress), start=1):
        each.total.ready += number
        each.current.completed += 2 * number
    epoch.automatic_optimization.optim_progress.optimizer.step.total.ready += 7
    epoch.batch_progress.is_last_batch = True
    found = loops.progress().counters
    assert found["epoch_loop.batch_progress"] == epoch.batch_progress.state_dict()
    assert found["epoch_loop.scheduler_progress"] == epoch.scheduler_progress.state_dict()
    progress = epoch.automatic_optimization.optim_progress
    assert found["epoch_loop.automatic_optimization.optim_progress"] == progress.state_dict()
    before = loops.progress().counters
    epoch.batch_progress.total.ready += 1
    assert before == found != loops.progress().counters
    epoch.batch_progress = type(epoch.batch_progress)()
    assert loops.progress().counters["epoch_loop.batch_progress"] == epoch.batch_progress.state_dict()


def test_a_loop_forgets_after_a_turn_that_it_was_loaded() -> None:
    """All that a later version remembers of it is forgotten through one method, and earlier ones remember one thing."""
    made = inspect.getsource(_Loop.__init__)
    if hasattr(_Loop, "on_iteration_done"):
        assert "self.on_iteration_done()" in inspect.getsource(_FitLoop.run)
        assert "_restart_stage = RestartStage.NONE" in inspect.getsource(_FitLoop.reset_restart_stage)
    else:
        assert re.findall(r"self\.(\w+)\b.* = ", made) == ["_restarting", "trainer"]


def test_a_deferred_save_has_one_name() -> None:
    source = inspect.getsource(ModelCheckpoint)
    assert set(re.findall(r"self\.(\w*defer\w*)", source)) <= {"_defer_save_until_validation"}


def test_a_validation_is_run_and_measured_as_it_is_asked_about() -> None:
    """``Loops.validation_batches`` reads the length of a validation; a stop leaves between two of its batches."""
    assert "self.val_loop.run()" in inspect.getsource(_TrainingEpochLoop.on_advance_end)
    assert {"max_batches", "_is_sequential"} <= set(dir(_EvaluationLoop))
    source = inspect.getsource(_EvaluationLoop._evaluation_step)
    assert source.index("increment_processed()") < source.index('"on_validation_batch_end"')


def test_signals_are_taken_after_a_checkpoint_is_loaded() -> None:
    """``callback`` lets Lightning register its handlers beneath this package's, and restores in the opposite order."""
    source = inspect.getsource(pl.Trainer._run)
    load, register = (source.rindex(name) for name in ("_restore_modules_and_callbacks(", "register_signal_handlers()"))
    assert load < register < source.index("self._run_stage()") < source.index("self._teardown()")
    assert "self._signal_connector.teardown()" in inspect.getsource(pl.Trainer._teardown)


def test_a_loader_is_known_before_a_pass_over_it_begins() -> None:
    source = inspect.getsource(_FitLoop.setup_data)
    assert source.index("self._load_combined_loader_states()") < source.index("iter(self._data_fetcher)")


def test_a_logged_value_can_be_made_again() -> None:
    meta = _Metadata(fx="training_step", name="a", reduce_fx="mean")
    meta.sync = _Sync(_should=False, rank_zero_only=False, _op="mean")
    metric = _ResultMetric(meta, True)
    assert {"value", "cumulated_batch_size", "_forward_cache", "_update_count", "has_reset"} <= set(dir(metric))


def test_lightnings_own_plugin_writes_by_the_function_that_is_replaced() -> None:
    source = inspect.getsource(compat.io.TorchCheckpointIO.save_checkpoint)
    assert "_atomic_save(checkpoint, path)" in source
