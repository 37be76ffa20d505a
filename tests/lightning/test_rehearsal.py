"""The first save of a launch is loaded back: what a module's hooks leave out is refused there, or is not needed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from resume_adapters.core.session import finished
from resume_adapters.errors import UnsupportedSetting
from resume_adapters.lightning import ResumeCallback

import fits
from fits import Interrupted

DATA = torch.rand(8, 1, generator=torch.Generator().manual_seed(1))


class Tuned(fits.Line):
    """Trains a layer on a frozen one; saves what ``dropped`` does not name."""

    def __init__(self, interrupted_at: int | None, dropped: str, *, adds_it_again: bool = False) -> None:
        super().__init__(interrupted_at)
        torch.manual_seed(0)
        self.backbone = torch.nn.Linear(1, 1).requires_grad_(False)
        self.layer = torch.nn.Linear(1, 1)
        self.dropped, self.adds_it_again = dropped, adds_it_again

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return super().training_step(self.backbone(batch), batch_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: each for name, each in saved.items() if not name.startswith(self.dropped)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.adds_it_again:
            missing = {name: each for name, each in self.state_dict().items() if name.startswith(self.dropped)}
            checkpoint["state_dict"].update(missing)


def fit(directory: Path, module: Tuned, *callbacks: pl.Callback) -> Tuned:
    saving = ModelCheckpoint(dirpath=directory, every_n_train_steps=2, save_top_k=-1)
    fits.trainer_of(saving, *callbacks, max_epochs=3).fit(module, DataLoader(DATA, batch_size=2))
    return module


@pytest.mark.parametrize("adds_it_again", [False, True], ids=["not-strict", "added-again"])
def test_frozen_weights_may_be_left_out(adds_it_again: bool, tmp_path: Path) -> None:
    def module(interrupted_at: int | None = None) -> Tuned:
        made = Tuned(interrupted_at, "backbone.", adds_it_again=adds_it_again)
        made.strict_loading = adds_it_again
        return made

    bare = fit(tmp_path / "bare", module())
    for step in (3, 7):
        with pytest.raises(Interrupted):
            fit(tmp_path / "run", module(step), ResumeCallback())
    resumed = fit(tmp_path / "run", module(), ResumeCallback())
    assert resumed.global_step == 12
    assert all(torch.equal(value, resumed.state_dict()[name]) for name, value in bare.state_dict().items())


@pytest.mark.parametrize(
    ("dropped", "strict", "name"),
    [("layer.", False, r"layer\.weight"), ("backbone.", True, r"backbone\.weight")],
    ids=["trained", "frozen-but-strict"],
)
def test_weights_that_do_not_come_back_are_refused_at_the_save(
    dropped: str, strict: bool, name: str, tmp_path: Path
) -> None:
    module = Tuned(None, dropped)
    module.strict_loading = strict
    with pytest.raises(UnsupportedSetting, match=rf"2 of the tensors of Tuned do not come back .* {name} first"):
        fit(tmp_path, module, ResumeCallback())
    assert module.global_step == 2


def test_the_training_is_not_touched(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Draws(Tuned):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            torch.rand(1)
            self.eval().requires_grad_(False)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return super().training_step(batch + torch.rand(1), batch_idx)

    bare = fit(tmp_path / "bare", Draws(None, "nothing"))
    with caplog.at_level(logging.INFO):
        module = fit(tmp_path / "run", Draws(None, "nothing"), ResumeCallback())
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in bare.state_dict().items())
    assert "loaded back" not in caplog.text


class Held(pl.Callback):
    """Counts steps; ``broken``: reads what it has not saved."""

    def __init__(self, *, broken: bool = False) -> None:
        self.broken, self.steps, self.loads = broken, torch.zeros(1), [0]
        self.beside: Any = None

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps.copy_(state_dict.pop("count" if self.broken else "steps"))
        self.loads[0] += 1


def test_a_callback_that_does_not_load_what_it_saves_is_refused_at_the_save(tmp_path: Path) -> None:
    module = Tuned(None, "nothing")
    with pytest.raises(UnsupportedSetting, match=r"Held does not load what it saves \(KeyError: 'count'\), so that no"):
        fit(tmp_path, module, Held(broken=True), ResumeCallback())
    assert module.global_step == 2


@pytest.mark.parametrize("holds", [threading.Lock, lambda: torch.zeros(30_000_000)], ids=["a lock", "too much"])
def test_a_callback_that_cannot_be_copied_is_not_looked_at(holds: Callable[[], Any], tmp_path: Path) -> None:
    callback = Held(broken=True)
    callback.beside = holds()
    assert fit(tmp_path, Tuned(None, "nothing"), callback, ResumeCallback()).global_step == 12


def test_the_callbacks_are_not_touched(tmp_path: Path) -> None:
    counting = Held()
    fit(tmp_path, Tuned(None, "nothing"), counting, ResumeCallback())
    assert (counting.steps.item(), counting.loads) == (12, [0])


class OneMore(fits.Line):
    """Saves a key that its loader does not take."""

    def __init__(self, interrupted_at: int | None = None, *, takes_it: bool = True) -> None:
        super().__init__(interrupted_at)
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(1, 1)
        self.mean, self.takes_it = torch.zeros(1), takes_it

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.mean = self.mean + self.layer.weight.detach().sum()
        return super().training_step(batch, batch_idx)

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        return {**super().state_dict(*arguments, **options), "mean": self.mean}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.takes_it:
            self.mean = checkpoint["state_dict"].pop("mean")


def test_a_key_that_the_module_does_not_load_is_refused_at_the_save(tmp_path: Path) -> None:
    module: Any = OneMore(takes_it=False)
    with pytest.raises(UnsupportedSetting, match=r"1 of the tensors of OneMore do not come back .* mean first"):
        fit(tmp_path, module, ResumeCallback())
    assert module.global_step == 2


def test_one_that_a_hook_takes_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare: Any = fit(tmp_path / "bare", cast("Any", OneMore()))
    with pytest.raises(Interrupted):
        fit(tmp_path / "run", cast("Any", OneMore(7)), ResumeCallback())
    for _ in range(2):  # the second one finds a finished run, as in another process
        monkeypatch.setattr(finished, "_FINISHED", {})
        resumed: Any = fit(tmp_path / "run", cast("Any", OneMore()), ResumeCallback())
        assert torch.equal(resumed.mean, bare.mean) and torch.equal(resumed.layer.weight, bare.layer.weight)
