"""Lightning's own callbacks that change how a training goes on: exact after a kill, or refused by name."""

from __future__ import annotations

import gc
import json
import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import cli
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint, ModelPruning, StochasticWeightAveraging
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from torch.nn.utils import prune

from resume_adapters import KeepBest
from resume_adapters.core.session import finished
from resume_adapters.core.session.options import OPTIONS
from resume_adapters.errors import UnsupportedSetting
from resume_adapters.lightning import ResumeCallback
from resume_adapters.lightning.supported import require_supported
from resume_adapters.recovery import restartable
from resume_adapters.unedited import ENTRY

import contract

KILLS = {"finetuning": (8, 12, 17), "accumulation": (8, 14, 17, 19, 22)}


@pytest.mark.thorough
@pytest.mark.parametrize("callback", KILLS)
def test_a_callback_that_acts_at_the_start_of_an_epoch(
    callback: str, bench: contract.Bench, reference: Any, tmp_path: Path
) -> None:
    """A resume within the epoch does not begin it again, and has what the callback did there."""
    config = {"callbacks": callback}
    kills = [{"event": "on_train_batch_end", "step": step} for step in KILLS[callback]]
    contract.interrupted_equals_uninterrupted(bench, tmp_path, config, reference(config), kills)


REFUSED = {
    "StochasticWeightAveraging": lambda: StochasticWeightAveraging(1e-2),
    "ModelPruning": lambda: ModelPruning(prune.L1Unstructured, amount=0.5, parameters_to_prune=None),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_callback_with_which_no_resume_is_exact_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedSetting, match=f"^{name} .*so this run cannot be resumed exactly"):
        trainer_of(tmp_path, REFUSED[name](), ResumeCallback()).fit(BoringModel())


def test_processes_that_train_weights_of_their_own_are_refused(tmp_path: Path) -> None:
    strategy = DDPStrategy(model_averaging_period=4, process_group_backend="gloo")
    trainer = trainer_of(tmp_path, ResumeCallback(), strategy=strategy)
    with pytest.raises(UnsupportedSetting, match="model_averaging_period"):
        trainer.strategy.connect(BoringModel())
        require_supported(trainer)


def test_the_first_fsdp_is_refused_within_a_restartable_block(tmp_path: Path) -> None:
    """It does not start on a CPU."""
    trainer, strategy = trainer_of(tmp_path), FSDPStrategy()
    strategy.connect(BoringModel())
    trainer._accelerator_connector.strategy = strategy
    require_supported(trainer)
    with pytest.raises(UnsupportedSetting, match="FSDPStrategy keeps process groups that @restartable"):
        restartable(max_restarts=1)(lambda attempt: require_supported(trainer))()


def trainer_of(directory: Path, *callbacks: Any, **more: Any) -> pl.Trainer:
    options = {"accelerator": "cpu", "logger": False, "max_epochs": 2, "limit_train_batches": 3, "limit_val_batches": 0}
    saving = ModelCheckpoint(dirpath=directory / "run") if more.get("enable_checkpointing", True) else []
    every = [*callbacks, saving] if saving else list(callbacks)
    return pl.Trainer(callbacks=every, default_root_dir=directory, **{**options, **more})


class Parser:
    """Stands for the one of jsonargparse."""

    def save(self, config: str, path: str, overwrite: bool, **more: Any) -> None:
        with open(path, "w" if overwrite else "x") as file:
            file.write(config)


def test_the_config_of_a_command_line_is_written_again_by_a_launch_that_resumes(tmp_path: Path) -> None:
    """LightningCLI refuses a directory that has one, and without a logger it is the same in each launch."""
    for config in ("first", "second"):
        finished._FINISHED.clear()  # each is a process of its own
        writer = cli.SaveConfigCallback(Parser(), config)
        trainer_of(tmp_path, ResumeCallback(), writer).fit(BoringModel())
        assert (tmp_path / "config.yaml").read_text() == config and writer.overwrite is False
    with pytest.raises(RuntimeError, match="to NOT exist"):
        trainer_of(tmp_path / "other", cli.SaveConfigCallback(Parser(), "third")).fit(BoringModel())
        trainer_of(tmp_path / "other", ResumeCallback(), cli.SaveConfigCallback(Parser(), "fourth")).fit(BoringModel())


def test_the_callback_of_the_environment_comes_before_the_config(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Lightning adds it behind the callbacks of the script, and the one that writes the config is one of those."""
    native = cli.SaveConfigCallback.setup
    monkeypatch.setenv("RESUME_ADAPTERS", "1")
    monkeypatch.syspath_prepend(ENTRY)
    for config in ("first", "second"):
        finished._FINISHED.clear()
        trainer = trainer_of(tmp_path, cli.SaveConfigCallback(Parser(), config))
        never_fitted = trainer_of(tmp_path)
        assert cli.SaveConfigCallback.setup is not native
        del never_fitted
        for _ in range(2):
            trainer.fit(BoringModel())
            trainer.fit_loop.max_epochs += 1
        assert (tmp_path / "config.yaml").read_text() == config
        gc.collect()
        assert cli.SaveConfigCallback.setup is native  # nobody is left who asked for it
    monkeypatch.delenv("RESUME_ADAPTERS")
    with pytest.raises(RuntimeError, match="to NOT exist"):
        trainer_of(tmp_path, cli.SaveConfigCallback(Parser(), "third")).fit(BoringModel())


def test_the_environment_leaves_a_trainer_alone_that_saves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RESUME_ADAPTERS", "1")
    monkeypatch.syspath_prepend(ENTRY)
    trainer = trainer_of(tmp_path, enable_checkpointing=False)
    trainer.fit(BoringModel())
    assert trainer.global_step == 6
    assert caplog.text.count("it trains without being resumed") == 1
    trainer_of(tmp_path).fit(BoringModel())
    assert (tmp_path / "run" / ".resume").is_dir()


def test_what_a_trainer_that_saves_nothing_is_given_for_a_fit_is_taken_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RESUME_ADAPTERS", "1")
    monkeypatch.setenv(OPTIONS, '{"save_every": 2}')
    monkeypatch.syspath_prepend(ENTRY)
    trainer = trainer_of(tmp_path, enable_checkpointing=False)
    before = [*trainer.callbacks]
    trainer.fit(BoringModel())
    trainer.validate(BoringModel())
    assert trainer.callbacks == before and trainer.checkpoint_callback is None
    assert {file.name for file in tmp_path.glob("checkpoints-of-fit-*/*.ckpt")} >= {"resume-step=6.ckpt"}


@pytest.mark.parametrize(("options", "horizon"), [({}, 6), ({"max_steps": 4}, 4)], ids=["epochs", "steps"])
def test_a_finished_run_says_how_many_steps_it_has(options: dict[str, Any], horizon: int, tmp_path: Path) -> None:
    trainer_of(tmp_path, ResumeCallback(), **options).fit(BoringModel())
    status = json.loads((tmp_path / "run" / ".resume" / "status.json").read_bytes())
    assert (status["step"], status["horizon"]) == (horizon, horizon)


class Unfreezing(BaseFinetuning):
    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.layer[0])

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.layer[0], optimizer)


class Layered(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.layer: Any = torch.nn.Sequential(torch.nn.Linear(32, 4), torch.nn.Linear(4, 2))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD([each for each in self.parameters() if each.requires_grad], lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def test_groups_that_finetuning_has_added_are_no_changed_settings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = None
    with caplog.at_level(logging.INFO, "resume_adapters"):
        for epochs in (2, 3):
            caplog.clear()
            torch.manual_seed(1)
            trainer = trainer_of(tmp_path, Unfreezing(), ResumeCallback(), max_epochs=epochs)
            trainer.fit(Layered(), ckpt_path=path)
            path = trainer.checkpoint_callback.best_model_path
    (line,) = [each for each in caplog.messages if "Settings that differ" in each]
    assert "this launch's max_epochs 3 (was 2)." in line


class Logging(BoringModel):
    """Logs at each place where a metric may come from."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        self.log("train_loss", output["loss"], on_step=False, on_epoch=True)
        return output

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", 1.0)

    def on_train_epoch_end(self) -> None:
        self.log("train_accuracy", 0.5)


WITHIN = {"limit_train_batches": 4, "val_check_interval": 2}


@pytest.mark.parametrize(
    ("metric", "options", "step"),
    [
        *((metric, {}, None) for metric in ("val_loss", "train_loss", "train_accuracy")),
        *((metric, WITHIN, None) for metric in ("val_loss", "train_loss")),
        ("train_accuracy", {"limit_val_batches": 0}, None),
        ("val_loss", {"check_val_every_n_epoch": 2}, None),
        ("val_los", {}, 3),
        ("val_los", WITHIN, 2),
        ("train_los", {"limit_val_batches": 0}, 3),
    ],
)
def test_a_metric_of_the_policy_that_nobody_logs_is_an_error(
    metric: str, options: dict[str, Any], step: int | None, tmp_path: Path
) -> None:
    trainer = trainer_of(tmp_path, ResumeCallback(keep=KeepBest(1, metric)), **{"limit_val_batches": 2, **options})
    if step is None:
        trainer.fit(Logging())
        return
    with pytest.raises(UnsupportedSetting, match=f"the best by '{metric}', .* did you mean `{metric}s`"):
        trainer.fit(Logging())
    assert trainer.global_step == step
