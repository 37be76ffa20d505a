"""An epoch begins once, in whichever launch: what a resume goes on with has had its hooks."""

from __future__ import annotations

import contextlib
import csv
import json
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanMetric
from torchmetrics.wrappers import MinMaxMetric, Running

from resume_adapters.core.session import finished
from resume_adapters.errors import UnsupportedSetting
from resume_adapters.lightning import ResumeCallback, ResumeCheckpointIO

import fits
from fits import Interrupted

DATA = torch.rand(8, 1)

BEGUN: list[int] = []
"""The epochs that began in the last launch: not in the module, which would have those of all launches."""

SEEN: dict[int, tuple[list[float], bool]] = {}
"""What each step of the last launch was given."""


class Line(fits.Line):
    """Counts how often an epoch begins."""

    def __init__(self, interrupted_at: int | None) -> None:
        super().__init__(interrupted_at)
        BEGUN.clear()

    def on_train_epoch_start(self) -> None:
        BEGUN.append(self.current_epoch)


def trainer_of(directory: Path, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    saving = ModelCheckpoint(dirpath=directory, every_n_train_steps=2, save_top_k=-1)
    return fits.trainer_of(saving, *callbacks, **{"max_epochs": 3, **options})


def launch(directory: Path, interrupted_at: int | None) -> tuple[list[int], dict[str, int]]:
    """Train; return the epochs that began in this launch, and how many there were in all, by how far they came."""
    module = Line(interrupted_at)
    trainer = trainer_of(directory, ResumeCallback())
    trainer.fit(module, DataLoader(DATA, batch_size=2))
    return list(BEGUN), dict(vars(trainer.fit_loop.epoch_progress.total))


@pytest.mark.parametrize(("at", "begun"), [(7, [2]), (9, [2])], ids=["in the middle", "at the end"])
def test_an_epoch_begins_once(at: int, begun: list[int], tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        launch(tmp_path, at)
    found, counted = launch(tmp_path, None)
    assert found == begun
    assert counted == {"ready": 3, "started": 3, "processed": 3, "completed": 3}


class Initializing(Line):
    """Initializes its weights and its rate once it trains, as a library does that builds models for others."""

    def on_train_start(self) -> None:
        torch.nn.init.constant_(self.layer.weight, 3.0)
        self.optimizers().param_groups[0]["lr"] = 0.05

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.optimizers().param_groups[0]["lr"] *= 0.9
        return super().training_step(batch, batch_idx)


def test_what_a_hook_of_the_start_initializes_is_loaded_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def train(directory: Path, interrupted_at: int | None) -> tuple[Any, ...]:
        pl.seed_everything(1)
        module, trainer = Initializing(interrupted_at), trainer_of(directory, ResumeCallback())
        trainer.fit(module, DataLoader(DATA, batch_size=2))
        return module.layer.weight.item(), module.layer.bias.item(), trainer.optimizers[0].param_groups[0]["lr"]

    whole = train(tmp_path / "whole", None)
    assert "loaded again" not in caplog.text
    with pytest.raises(Interrupted):
        train(tmp_path / "run", 7)
    assert train(tmp_path / "run", None) == whole
    assert caplog.text.count("This start had changed what was loaded") == 1, caplog.text


class Pairs(Line):
    """Takes batches of two loaders, of which the shorter is at its end first."""

    def __init__(self, interrupted_at: int | None) -> None:
        super().__init__(interrupted_at)
        SEEN.clear()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch["long"], batch_idx)
        SEEN[self.global_step] = (batch["long"].flatten().tolist(), batch["short"] is None)
        return loss


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(0.0, 1.0, 1 / 16).view(16, 1))


@pytest.mark.parametrize("mode", ["max_size", "max_size_cycle"])
def test_a_loader_that_ended_before_another_stays_at_its_end(mode: str, tmp_path: Path) -> None:
    """Also in the launch after the next, whose checkpoint was saved by a launch in which it gave nothing."""
    seen: dict[int, tuple[list[float], bool]] = {}
    for interrupted_at in (5, 7, None):
        module = Pairs(interrupted_at)
        pair = {"long": DataLoader(Stream(), 2), "short": DataLoader(torch.arange(6.0).view(6, 1), 2)}
        with pytest.raises(Interrupted) if interrupted_at else contextlib.nullcontext():
            trainer_of(tmp_path, ResumeCallback(), max_epochs=1).fit(module, CombinedLoader(pair, mode))
        assert min(SEEN) == {5: 0, 7: 4, None: 6}[interrupted_at]
        seen |= SEEN
    assert seen == {step: ([step / 8, step / 8 + 1 / 16], mode == "max_size" and step >= 3) for step in range(8)}


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("interrupted_at", [None, 7])
def test_everything_is_undone(interrupted_at: int | None, resumed: bool, tmp_path: Path) -> None:
    """Whether a fit ends or fails: handlers, callbacks and methods of the trainer are those of before."""
    if resumed:
        with pytest.raises(Interrupted):
            launch(tmp_path, 5)
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    handlers = [signal.getsignal(each) for each in numbers]
    plugin, module = ResumeCheckpointIO(), Line(interrupted_at)
    trainer = trainer_of(tmp_path, ResumeCallback(), plugins=[plugin])
    callbacks = list(trainer.callbacks)
    with pytest.raises(Interrupted) if interrupted_at else contextlib.nullcontext():
        trainer.fit(module, DataLoader(DATA, batch_size=2))
    assert [signal.getsignal(each) for each in numbers] == handlers
    assert trainer.callbacks == callbacks
    loop = trainer.fit_loop
    connectors = (trainer._checkpoint_connector, trainer._signal_connector)
    owners = (trainer, trainer.strategy, module, loop, loop.epoch_loop, loop.epoch_loop.val_loop, *connectors)
    patched = {(type(each).__name__, name) for each in (*owners, *callbacks) for name in methods(each)}
    assert not patched
    plugin.save_checkpoint({}, tmp_path / "a.ckpt")
    (tmp_path / ".b.ckpt.tmp").mkdir()
    with pytest.raises(OSError, match="could not be written"):
        plugin.save_checkpoint({}, tmp_path / "b.ckpt")


class InterruptedByHand(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 3:
            raise KeyboardInterrupt


def test_a_training_that_a_notebook_has_interrupted_does_not_run(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit):  # Lightning's own
        trainer_of(tmp_path, ResumeCallback(), InterruptedByHand()).fit(Line(None), DataLoader(DATA, batch_size=2))
    signal.signal(signal.SIGINT, before)  # which Lightning ignores from now on
    status = json.loads((tmp_path / ".resume" / "status.json").read_bytes())
    assert (status["state"], status["step"], status["reason"]) == ("failed", 2, "KeyboardInterrupt")


def methods(thing: Any) -> list[str]:
    """Return the methods of a class that an object has of its own."""
    return [name for name in vars(thing) if callable(getattr(type(thing), name, None))]


def test_a_trainer_can_fit_again(tmp_path: Path) -> None:
    """What one fit has wrapped is not there for the next, which resumes what the first has saved."""
    module, callback = Line(7), ResumeCallback()
    trainer, loader = trainer_of(tmp_path, callback), DataLoader(DATA, batch_size=2)
    with pytest.raises(Interrupted):
        trainer.fit(module, loader)
    assert callback.active_run is None
    again = Line(None)
    trainer_of(tmp_path, callback).fit(again, loader)
    assert BEGUN == [2]


def test_a_second_phase_with_a_trainer_of_its_own_is_not_taken_for_the_first_one_going_on(tmp_path: Path) -> None:
    """Lightning begins it at step 0; only the trainer that has trained, or a ckpt_path, trains the run further."""
    loader = DataLoader(DATA, batch_size=2)
    first = trainer_of(tmp_path, ResumeCallback(), max_epochs=1)
    first.fit(Line(None), loader)
    with pytest.raises(UnsupportedSetting, match="with a Trainer that has trained nothing and gets no ckpt_path: it"):
        trainer_of(tmp_path, ResumeCallback(), max_epochs=2).fit(Line(None), loader)
    first.fit_loop.max_epochs = 2
    first.fit(Line(None), loader)
    assert BEGUN == [1]
    trainer_of(tmp_path, ResumeCallback()).fit(Line(None), loader, ckpt_path=str(tmp_path / "epoch=1-step=8.ckpt"))
    assert BEGUN == [2]


class Rows(Logger):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[str, int | None, float]] = []

    @property
    def name(self) -> str:
        return "rows"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows += [(name, step, float(value)) for name, value in metrics.items()]

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


class Validated(Line):
    """Logs each batch of its validations."""

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("loss", self.layer(batch).mean(), on_step=True, on_epoch=False)


def test_the_steps_of_validations_go_on(tmp_path: Path) -> None:
    """Lightning counts them over the whole training; at 0 again, loggers would have two values for a step."""
    found = []
    for interrupted_at, directory in ((None, "whole"), (9, "halves"), (None, "halves")):
        rows, data = Rows(), DataLoader(DATA, batch_size=2)
        trainer = trainer_of(tmp_path / directory, ResumeCallback())
        trainer.logger = rows
        with pytest.raises(Interrupted) if interrupted_at else contextlib.nullcontext():
            trainer.fit(Validated(interrupted_at), data, data)
        found.append([row[:2] for row in rows.rows if row[0] == "loss"])
    whole, first, second = found
    # The checkpoint of step 8 is that of a batch: the validation that follows it is repeated.
    assert len(whole) == 12 and first == whole[:8] and second == whole[4:]


class Measured(Line):
    """Logs torchmetrics objects, which Lightning resets, and values of its own, of which one keeps what it has seen."""

    def __init__(self, interrupted_at: int | None) -> None:
        super().__init__(interrupted_at)
        torch.nn.init.ones_(self.layer.weight)
        torch.nn.init.zeros_(self.layer.bias)
        self.trained, self.validated, self.largest = MeanMetric(), MeanMetric(), MinMaxMetric(MeanMetric())
        self.recent = Running(MeanMetric(), window=3)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        for metric in (self.trained, self.largest, self.recent):
            metric(loss)
        self.log("trained", self.trained, on_step=False, on_epoch=True)
        self.log("recent", self.recent.compute())
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.validated(self.layer(batch).square().mean())
        self.log("validated", self.validated)

    def on_train_epoch_end(self) -> None:
        self.log("largest", self.largest.compute()["max"])


@pytest.mark.thorough
@pytest.mark.parametrize("saving", ["validated", "trained", "recent"])
def test_torchmetrics_objects_go_on(saving: str, tmp_path: Path) -> None:
    """Saved after a validation, an epoch and a batch: Lightning resets what was logged when all callbacks are done."""
    options = {"every_n_train_steps": 1} if saving == "recent" else {"save_on_train_epoch_end": saving == "trained"}
    data = [DataLoader(torch.arange(8.0).view(8, 1) / 4, batch_size=2) for _ in range(2)]
    rows = []
    for interrupted_at, directory in ((None, "whole"), (7, "halves"), (None, "halves")):
        rows.append(Rows())
        saves = ModelCheckpoint(tmp_path / directory, monitor=saving, save_top_k=-1, **options)
        often = {"max_epochs": 3, "logger": rows[-1], "val_check_interval": 2, "log_every_n_steps": 1}
        trainer = fits.trainer_of(saves, ResumeCallback(), **often)
        with pytest.raises(Interrupted) if interrupted_at else contextlib.nullcontext():
            trainer.fit(Measured(interrupted_at), *data)
    whole, first, second = (each.rows for each in rows)
    assert set(first) | set(second) == set(whole) and set(second) != set(whole)


@pytest.mark.parametrize("version", [0, None])
def test_rows_of_a_csv_file_stay_and_are_there_once(version: int | None, tmp_path: Path) -> None:
    """CSVLogger deletes the file of its version at a launch; without a version, each launch has a directory."""
    data = [DataLoader(torch.arange(8.0).view(8, 1) / 4, batch_size=2) for _ in range(2)]
    for interrupted_at, directory in ((None, "whole"), (5, "halves"), (9, "halves"), (None, "halves")):
        rows = CSVLogger(tmp_path / directory, "logs", version)
        trainer = trainer_of(tmp_path / directory / "run", ResumeCallback())
        trainer.logger, trainer.log_every_n_steps = rows, 1
        with pytest.raises(Interrupted) if interrupted_at else contextlib.nullcontext():
            trainer.fit(Measured(interrupted_at), *data)
    whole, *halves = (
        [line for file in sorted((tmp_path / each).rglob("metrics.csv")) for line in csv.DictReader(file.open())]
        for each in ("whole", "halves")
    )
    if version == 0:
        assert halves == [whole] and len(whole) > 12
    else:
        assert len(halves[0]) > len(whole)


class Hooked(ResumeCallback):
    """A callback of the script that has a hook of each step of its own."""

    calls = 0

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_after_backward(trainer, pl_module)
        self.calls += 1


def test_hooks_that_a_callback_has_are_called_and_the_others_are_there_again_after_the_fit(tmp_path: Path) -> None:
    callback, cleared = Hooked(), []
    callback.on_before_zero_grad = lambda *_: cleared.append(True)  # type: ignore[method-assign]
    trainer_of(tmp_path, callback, plugins=[ResumeCheckpointIO()], max_epochs=1).fit(
        Line(None), DataLoader(torch.ones(4, 1), 2)
    )
    assert (callback.calls, len(cleared)) == (2, 2)
    assert callable(callback.on_before_backward) and callable(callback.on_before_optimizer_step)
    assert "on_before_backward" not in vars(callback)


class Sparse(pl.LightningModule):
    """Leaves sparse gradients in its parameter from each step to the next, as it optimizes by hand."""

    automatic_optimization = False

    def __init__(self, interrupted_at: int | None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words = torch.nn.Embedding(8, 2, sparse=True)
        self.interrupted_at = interrupted_at

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        if self.global_step == self.interrupted_at:
            raise Interrupted
        optimizer: Any = self.optimizers()
        if batch_idx % 2 == 0:
            optimizer.zero_grad()
        self.manual_backward(self.words((batch.flatten() * 7).long()).square().sum())
        optimizer.step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def test_sparse_gradients_that_a_step_leaves_come_back(tmp_path: Path) -> None:
    ended: list[torch.Tensor] = []
    for directory, interruptions in ((tmp_path / "whole", [None]), (tmp_path / "killed", [4, 10, None])):
        for interrupted_at in interruptions:
            module = Sparse(interrupted_at)
            with contextlib.suppress(Interrupted):
                trainer_of(directory, ResumeCallback()).fit(module, DataLoader(DATA, batch_size=2))
        ended.append(module.words.weight.detach())
    assert torch.equal(*ended)


class Slow(Line):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        time.sleep(0.1)


def test_a_run_that_has_used_up_its_time_goes_on_with_more_and_says_so_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def train(seconds: float) -> int:
        finished._FINISHED.clear()  # as a new process
        trainer = trainer_of(tmp_path, ResumeCallback(), Timer(timedelta(seconds=seconds)), max_epochs=-1)
        trainer.fit(Slow(None), DataLoader(DATA, batch_size=2))
        return trainer.global_step

    reached = train(0.25)
    assert train(0.25) == reached and "(max_time is over, or the duration of a Timer): nothing to do" in caplog.text
    assert train(1) > reached
