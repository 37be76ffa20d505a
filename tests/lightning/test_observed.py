"""What a module and its callbacks hold and nobody has declared: found in real trainings, and restored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateFinder, ModelCheckpoint
from torch.utils.data import DataLoader, Dataset, Subset

from resume_adapters.errors import NotRestored
from resume_adapters.lightning import ResumeCallback, observed
from selection import often

import contract
from fits import Interrupted, Line, trainer_of

KILLS = [{"event": "on_train_batch_end", "step": step} for step in (8, 18, 28)]
CASES: dict[str, dict[str, Any]] = {
    "steps": {},
    "epochs": {"checkpoints": [{"every_n_train_steps": None, "every_n_epochs": 1}]},
    "validations": {"validate": True, "trainer": {"val_check_interval": 7}},
}


@pytest.mark.parametrize("case", often(CASES, "validations"))
def test_counters_and_a_layer_that_a_callback_unfreezes_resume_though_nobody_saves_them(
    case: str, bench: contract.Bench, reference: Any, tmp_path: Path
) -> None:
    config = {"holding": True, "samples": 100, **CASES[case]}
    kills = KILLS[1:] if case == "epochs" else KILLS
    contract.interrupted_equals_uninterrupted(bench, tmp_path, config, reference(config), kills)


def test_it_is_named_and_a_plain_module_holds_nothing(bench: contract.Bench, tmp_path: Path) -> None:
    bench.run(tmp_path / "holding", {"holding": True}).require_success()
    found = contract.parts(tmp_path / "holding" / bench.run_directory)["observed"]
    for path in ("module.batches", "module.recent", "callbacks.Unfreezing.0.batches", "requires_grad of module.body"):
        assert path in found, path
    plain = bench.run(tmp_path / "plain", {"validate": True, "plateau": {"monitor": "val_loss"}}).require_success()
    assert "observed" not in contract.parts(tmp_path / "plain" / bench.run_directory)
    assert "MISSING" not in plain.output


class Annealing(Line):
    """Anneals a hyperparameter, and adds one."""

    def __init__(self, interrupted_at: int | None) -> None:
        super().__init__(interrupted_at)
        self.save_hyperparameters({"forcing": 1.0, "nested": {"calls": 0}})

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.hparams.forcing *= 0.9
        self.hparams["nested"]["calls"] += 1
        self.hparams.setdefault("steps", []).append(self.global_step)
        self.log("loss", loss)
        return loss


class Counting(EarlyStopping):
    """Inherits how its state is saved, which knows nothing of what it counts."""

    def __init__(self) -> None:
        super().__init__("loss", patience=100)
        self.checked: list[int] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        self.checked.append(trainer.current_epoch)


class Clipping(pl.Callback):
    """Changes a setting of the trainer once."""

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 1:
            trainer.gradient_clip_val = 0.1


def fit(directory: Path, interrupted_at: int | None) -> tuple[Any, ...]:
    """Train; return what the module, a callback and the trainer hold at the end."""
    module, counting = Annealing(interrupted_at), Counting()
    saves = ModelCheckpoint(directory, every_n_train_steps=3)
    trainer = trainer_of(saves, Clipping(), counting, ResumeCallback(), max_epochs=4, gradient_clip_val=5.0)
    pl.seed_everything(1)
    trainer.fit(module, DataLoader(torch.rand(8, 1), batch_size=2))
    return dict(module.hparams), counting.checked, counting.wait_count, trainer.gradient_clip_val


def test_hyperparameters_settings_and_what_a_callback_adds_to_one_of_lightning_resume(tmp_path: Path) -> None:
    expected = fit(tmp_path / "whole", None)
    with pytest.raises(Interrupted):
        fit(tmp_path / "run", 14)
    found = fit(tmp_path / "run", None)
    assert found == expected and expected[1] == [0, 1, 2, 3] and expected[3] == 0.1


class Meter:
    """Is made when it is asked for."""

    current: Meter | None = None
    steps = 0


class Metered(Line):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        Meter.current = Meter.current or Meter()
        Meter.current.steps += 1
        return super().training_step(batch, batch_idx)


def test_what_a_first_step_makes_of_the_script_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Meter, "current", None)
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=2)
    trainer = trainer_of(saves, ResumeCallback(), max_epochs=1)
    trainer.fit(Metered(None), DataLoader(torch.rand(8, 1), batch_size=2))
    assert "script MISSING: `Meter.current.steps` (of a Meter)" in caplog.text


class Checked(Line):
    """Keeps what its validations see, and the first batch that trains it: Lightning checks and searches before."""

    def __init__(self, interrupted_at: int | None) -> None:
        super().__init__(interrupted_at)
        self.seen, self.first, self.means, self.lr, self.trained = 0, None, [0.0], 0.1, None
        self.register_buffer("cached", torch.zeros(0), persistent=False)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.trained = batch.item() if self.trained is None else self.trained
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.seen += 1
        self.first = batch.sum().item() if self.first is None else self.first
        self.means.append(batch.mean().item())
        self.cached = torch.ones(3) if not self.cached.numel() else self.cached


def test_what_only_a_finder_or_the_sanity_check_has_changed_resumes(tmp_path: Path) -> None:
    """They are not done again."""

    def fit(directory: Path, interrupted_at: int | None) -> tuple[Any, ...]:
        pl.seed_everything(1)
        module = Checked(interrupted_at)
        finder = LearningRateFinder(num_training_steps=4, early_stop_threshold=None)  # it validates where it stops
        saves = ModelCheckpoint(directory, every_n_train_steps=3)
        trainer = trainer_of(saves, finder, ResumeCallback(), max_steps=7)
        data = torch.rand(8, 1)
        trainer.fit(module, DataLoader(data, shuffle=True), DataLoader(data))
        return module.seen, module.first, module.means, module.cached.tolist(), module.trained

    expected = fit(tmp_path / "whole", None)
    with pytest.raises(Interrupted):
        fit(tmp_path / "run", 5)
    assert fit(tmp_path / "run", None) == expected and expected[0] == 2


def test_what_a_callback_of_lightning_has_itself_is_left_to_its_state_dict() -> None:
    stopping, checkpoint = EarlyStopping("loss"), ModelCheckpoint()
    for each in (stopping, checkpoint):
        assert vars(each).keys() <= observed._own_names(type(each))
    assert "checked" not in observed._own_names(Counting)


class Noisy(Dataset[torch.Tensor]):
    """Draws from a generator of its own, and counts; it opens nothing."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(5)
        self.reads = 0

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads += 1
        return torch.tensor(self.random.normal(size=1), dtype=torch.float32)


class Validated(Annealing):
    """Keeps what each validation has found, out of sight of this package."""

    def __init__(self, interrupted_at: int | None, found: dict[int, list[float]]) -> None:
        super().__init__(interrupted_at)
        self.keep = found.setdefault

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.keep(self.global_step, []).extend(batch.flatten().tolist())


@pytest.mark.parametrize("sanity", [0, 2])
@pytest.mark.parametrize("shares", [False, True])
def test_validations_read_on_from_where_a_generator_of_theirs_was(shares: bool, sanity: int, tmp_path: Path) -> None:
    def validate(directory: Path, interrupted_at: int | None, found: dict[int, list[float]]) -> None:
        pl.seed_everything(1)
        data = Noisy()
        trained: Any = Subset(data, range(6)) if shares else torch.rand(8, 1)
        order = torch.Generator().manual_seed(3)
        saves = ModelCheckpoint(directory, every_n_train_steps=2)
        trainer = trainer_of(saves, ResumeCallback(), max_epochs=4, num_sanity_val_steps=sanity)
        validation = DataLoader(Subset(data, range(4)), batch_size=2, shuffle=True, generator=order)
        trainer.fit(Validated(interrupted_at, found), DataLoader(trained, batch_size=2), validation)

    expected: dict[int, list[float]] = {}
    validate(tmp_path / "whole", None, expected)
    found: dict[int, list[float]] = {}
    with pytest.raises(Interrupted):
        validate(tmp_path / "run", 9, found)
    resumed: dict[int, list[float]] = {}
    validate(tmp_path / "run", None, resumed)
    assert {**found, **resumed} == expected and len(expected) == 4


class Plain(Line):
    """Takes integers."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch.reshape(-1, 1) / 40, batch_idx)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_split_that_is_drawn_otherwise_is_refused(tmp_path: Path, seed: int) -> None:
    """Without workers Lightning fetches no batch ahead that could differ: one that was used is fetched again."""

    def fit(interrupted_at: int | None, seed: int) -> None:
        split, _ = torch.utils.data.random_split(
            range(40),
            [20, 20],
            generator=torch.Generator().manual_seed(seed),  # type: ignore[arg-type]
        )
        trainer = trainer_of(ModelCheckpoint(tmp_path, every_n_train_steps=2), ResumeCallback(), max_steps=8)
        trainer.fit(Plain(interrupted_at), DataLoader(split, batch_size=2))

    with pytest.raises(Interrupted):
        fit(5, 0)
    if seed == 0:
        fit(None, seed)
        return
    with pytest.raises(NotRestored, match=r"the samples 2, 3 of .*: dataset\.indices has other numbers than then"):
        fit(None, seed)
