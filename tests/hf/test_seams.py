"""Each private seam of the installed versions: a clear failure here when a release moves one."""

from __future__ import annotations

import inspect
import types
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers.trainer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from resume_adapters import hf
from resume_adapters.core.dataloader.tracked import track
from resume_adapters.errors import UnsupportedSetting
from resume_adapters.hf.supported import require_supported
from resume_adapters.integrations import accelerate_state

import contract

METHODS: dict[str, list[str]] = {
    "train": ["self", "resume_from_checkpoint", "trial", "ignore_keys_for_eval"],
    "get_train_dataloader": ["self"],
    "get_eval_dataloader": ["self", "eval_dataset"],
    "_load_from_checkpoint": ["self", "resume_from_checkpoint", "model"],
    "_load_rng_state": ["self", "checkpoint"],
    "get_batch_samples": ["self", "epoch_iterator", "num_batches", "device"],
    "_load_optimizer_and_scheduler": ["self", "checkpoint"],
    "_save_checkpoint": ["self", "model", "trial"],
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
}
IN_METHODS: dict[str, list[str]] = {
    "_init_training_state": [
        "self",
        "max_steps",
        "num_update_steps_per_epoch",
        "num_train_epochs",
        "resume_from_checkpoint",
        "trial",
    ],
    "_prepare_for_training": ["self", "max_steps", "train_dataloader", "resume_from_checkpoint"],
    "_finalize_training": ["self", "trial", "num_train_samples", "start_time"],
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
IN_ONE: dict[str, list[str]] = {
    "_inner_training_loop": [
        "self",
        "batch_size",
        "args",
        "resume_from_checkpoint",
        "trial",
        "ignore_keys_for_eval",
    ],
    "set_initial_training_values": ["self", "args", "dataloader", "total_train_batch_size"],
    "_load_callback_state": ["self"],
    "training_step": ["self", "model", "inputs", "num_items_in_batch"],
}
RETENTION: dict[str, list[str]] = {
    "_sorted_checkpoints": ["self", "output_dir", "checkpoint_prefix", "use_mtime"],
    "_rotate_checkpoints": ["self", "use_mtime", "output_dir"],
}
IS_ONE = not hasattr(Trainer, "_run_epoch")
METHODS |= IN_ONE if IS_ONE else IN_METHODS
FUNCTIONS = ["skip_first_batches", *(["deepspeed_load_checkpoint", "speed_metrics"] if IS_ONE else [])]
if hasattr(Trainer, "_rotate_checkpoints"):  # before transformers 5.2
    METHODS |= RETENTION
else:
    FUNCTIONS += ["rotate_checkpoints", "sort_checkpoints"]


@pytest.mark.parametrize("framework", [transformers, accelerate], ids=lambda each: each.__name__)
def test_an_older_version_is_refused(framework: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    contract.older_framework_is_refused(hf, framework, monkeypatch)


def test_deepspeed_through_an_older_accelerate_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    trainer = types.SimpleNamespace(args=arguments, is_fsdp_enabled=False, is_deepspeed_enabled=True)
    monkeypatch.setattr(accelerate, "__version__", "1.9.0")
    require_supported(trainer, None)
    monkeypatch.setattr(accelerate, "__version__", "1.8.1")
    with pytest.raises(UnsupportedSetting, match=r"accelerate 1\.8\.1, older than 1\.9, drives DeepSpeed otherwise"):
        require_supported(trainer, None)


@pytest.mark.parametrize("name", METHODS)
def test_the_trainer_has_the_method_as_it_is_overridden(name: str) -> None:
    parameters = list(inspect.signature(inspect.unwrap(getattr(Trainer, name))).parameters)
    if parameters[-1] == "kwargs":  # of 4.57, for arguments of versions before it
        parameters.pop()
    assert parameters == METHODS[name], f"Trainer.{name} takes other arguments in {transformers.__version__}"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_trainer_calls_the_function_by_its_module_name(name: str) -> None:
    assert callable(getattr(transformers.trainer, name))
    source = inspect.getsource(Trainer)
    assert f" {name}(" in source, f"the Trainer of {transformers.__version__} no longer calls {name}"


def require_order(source: str, *pairs: tuple[str, str]) -> None:
    for earlier, later in pairs:
        assert 0 <= source.index(earlier) < source.rindex(later), f"{earlier} and {later}: {transformers.__version__}"


@pytest.mark.skipif(IS_ONE, reason="the loop is one method")
def test_the_order_of_a_save_and_a_resume() -> None:
    """What is set before and after the events and methods that the adapter stands in."""
    loop = inspect.getsource(Trainer._inner_training_loop)
    if "_initial_global_step" in inspect.getsource(Trainer):
        require_order(loop, ("self._initial_global_step =", "on_train_begin("))
    require_order(
        loop,
        ("self.get_train_dataloader()", "self._init_training_state("),
        ("self._init_training_state(", "self._prepare_for_training("),
        ("self._tr_loss =", "on_train_begin("),
        ("self._globalstep_last_logged =", "on_train_begin("),
    )
    require_order(
        inspect.getsource(Trainer._run_epoch),
        ("skip_first_batches(", "set_epoch("),
        ("set_epoch(epoch)", "iter(train_dataloader)"),
        ("self.get_batch_samples(", "self.training_step("),
    )


@pytest.mark.skipif(not IS_ONE, reason="the loop has a method for each part")
def test_the_order_in_a_loop_that_is_one_method() -> None:
    """The loop asks where it goes on after the counters are loaded, and takes the answer as it is."""
    loop = inspect.getsource(Trainer._inner_training_loop)
    require_order(
        loop,
        ("self.get_train_dataloader()", "self.set_initial_training_values("),
        ("deepspeed_load_checkpoint(", "self._load_optimizer_and_scheduler("),
        ("self._load_optimizer_and_scheduler(", "TrainerState.load_from_json("),
        ("TrainerState.load_from_json(", "self._load_callback_state()"),
        ("self._load_callback_state()", "self.state.global_step // num_update_steps_per_epoch"),
        ("self._load_callback_state()", "self.state.global_step % (num_update_steps_per_epoch)"),
        ("self.state.global_step // num_update_steps_per_epoch", "self.state.init_training_references("),
        ("self.state.init_training_references(", "self.callback_handler.on_train_begin("),
        ("self._total_loss_scalar = 0.0", "self.callback_handler.on_train_begin("),
        ("self._globalstep_last_logged =", "self.callback_handler.on_train_begin("),
        ("self.callback_handler.on_train_begin(", "for epoch in range(epochs_trained, num_train_epochs)"),
        ("self.callback_handler.on_epoch_begin(", "skip_first_batches("),
        ("skip_first_batches(", "iter(epoch_dataloader)"),
        ("self.get_batch_samples(", "self.training_step("),
        ("self.callback_handler.on_epoch_end(", "self._maybe_log_save_evaluate("),
        ("self._load_best_model()", "self._total_loss_scalar += tr_loss.item()"),
        ("self._total_loss_scalar += tr_loss.item()", "speed_metrics("),
    )
    assert loop.count("num_update_steps_per_epoch") == 4, "the steps of an epoch are used for something else"
    assert "tr_loss = tr_loss + tr_loss_step" in loop


@pytest.mark.skipif(not IS_ONE, reason="the loop has a method for each part")
@pytest.mark.parametrize(("restored", "loss", "joined"), [(3.0, 0.25, 3.25), (3.0, float("nan"), 4.0)])
def test_a_restored_running_loss_joins_that_of_the_first_step(restored: float, loss: float, joined: float) -> None:
    """As it would be where it had been summed: the loop puts the mean of what it has in the place of a NaN."""
    from resume_adapters.hf.loop_before_5_3 import LoopEvents

    trainer: Any = types.SimpleNamespace(
        args=types.SimpleNamespace(logging_nan_inf_filter=True, device="cpu"),
        state=types.SimpleNamespace(global_step=5),
        _globalstep_last_logged=3,
    )
    moments = LoopEvents(trainer, session=None, save_now=lambda: None)  # type: ignore[arg-type]
    trainer._tr_loss = torch.tensor(restored)
    assert moments.join_loss(torch.tensor(loss)).item() == joined
    assert moments.join_loss(torch.tensor(0.5)).item() == 0.5, "only the first is changed"


def test_the_loader_takes_its_indices_from_the_index_sampler() -> None:
    """A tracked loader is asked for ``_index_sampler`` when a pass begins, and stays a loader of its class."""
    plain = DataLoader(list(range(8)), batch_size=2)
    tracked = track(plain)
    assert isinstance(plain, DataLoader) and track(plain) is tracked
    assert [batch.tolist() for batch in plain] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert tracked.fetched == 4 and tracked.exhausted
    assert tracked.position(2).sampler is not None


def test_ddp_has_the_reducer_that_buckets_are_replayed_through() -> None:
    reducer: Any = torch.distributed.Reducer
    assert hasattr(reducer, "prepare_for_backward") and hasattr(reducer, "_rebuild_buckets")
    assert "self.reducer" in inspect.getsource(DistributedDataParallel)


def test_accelerate_looks_once_for_deepspeed_in_a_save(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def ask() -> bool:
        asked.append(True)
        return False

    model = torch.nn.Linear(1, 1)
    monkeypatch.setattr(accelerate.utils.other, "is_deepspeed_available", ask)
    for _ in range(2):
        with accelerate_state.asking_once_for_deepspeed():
            assert accelerate.utils.extract_model_from_parallel(model) is model
    assert asked == [True]
    accelerate.utils.extract_model_from_parallel(model)
    assert asked == [True, True]
