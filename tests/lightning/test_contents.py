"""What a file of Lightning may hold that only code could load: it is left where nothing reads it, else refused."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from resume_adapters.cli.commands.export import export
from resume_adapters.errors import CheckpointDamaged, NotSerialisable
from resume_adapters.lightning import ResumeCallback, ResumeCheckpointIO

RUN: list[str] = []
"""Which code ran as an object was loaded."""


class Interrupted(Exception):
    pass


class Normalizer:
    """An object whose loading runs code."""

    def __init__(self, scale: float = 2.0) -> None:
        self.scale = scale

    def __setstate__(self, state: dict[str, Any]) -> None:
        RUN.append("__setstate__")
        self.__dict__.update(state)

    def __reduce__(self) -> tuple[Any, ...]:
        return normalizer, (self.scale,), self.__dict__


def normalizer(scale: float) -> Normalizer:
    RUN.append("normalizer")
    return Normalizer(scale)


class Composed(pl.LightningModule):
    """Is given its parts, as configuration libraries do, and saves them all as hyperparameters."""

    def __init__(
        self, net: torch.nn.Module, optimizer: Any, normalizer: Normalizer, loss: type[torch.nn.Module]
    ) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.net = net
        self.loss = loss()
        self.interrupted_at: int | None = None

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.global_step == self.interrupted_at:
            raise Interrupted
        return self.loss(self.net(batch), self.hparams.normalizer.scale * batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.hparams.optimizer(params=self.parameters())


class Saving(Composed):
    """Adds an object of its own to each checkpoint."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["normalizers"] = {"target": [Normalizer()]}


class Loading(Saving):
    """Reads it again."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert isinstance(checkpoint["normalizers"]["target"][0], Normalizer)


class Holding(torch.optim.Adam):
    """Has an object in its state."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.param_groups[0]["normalizer"] = Normalizer()


def fit(
    directory: Path,
    kind: type[Composed] = Composed,
    interrupted_at: int | None = None,
    adapter: list[Any] | None = None,
    optimizer: Any = torch.optim.Adam,
    **options: Any,
) -> Composed:
    """Train eight steps."""
    torch.manual_seed(0)
    module = kind(torch.nn.Linear(2, 2), functools.partial(optimizer, lr=0.1), Normalizer(), torch.nn.MSELoss)
    module.interrupted_at = interrupted_at
    parts = [ResumeCallback()] if adapter is None else adapter
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[each for each in parts if not isinstance(each, pl.Callback)],
        callbacks=[
            ModelCheckpoint(dirpath=directory, every_n_train_steps=2, save_top_k=-1, filename="{step}"),
            *(each for each in parts if isinstance(each, pl.Callback)),
        ],
    )
    RUN.clear()
    trainer.fit(module, DataLoader(torch.rand(16, 2), batch_size=4, shuffle=True), **options)
    return module


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("kind", [Composed, Saving])
@pytest.mark.parametrize("parts", [1, 2], ids=["callback", "both"])
def test_hyperparameters_may_be_any_objects(tmp_path: Path, kind: type[Composed], parts: int) -> None:
    """Only ``load_from_checkpoint`` reads them, and what a module adds if no hook of it does."""
    adapter = lambda: [ResumeCallback(), ResumeCheckpointIO()][:parts]  # noqa: E731
    whole = fit(tmp_path / "whole", kind, adapter=adapter())
    with pytest.raises(Interrupted):
        fit(tmp_path / "run", kind, 5, adapter())
    resumed = fit(tmp_path / "run", kind, adapter=adapter())
    assert RUN == [], "no code of the checkpoint runs"
    assert resumed.global_step == 8 and same(resumed, whole)
    assert isinstance(resumed.hparams.normalizer, Normalizer)
    again = kind.load_from_checkpoint(tmp_path / "run" / "step=8.ckpt", weights_only=False)
    assert same(again, whole), "the bare framework reads the file as ever"


def test_what_a_hook_reads_is_refused_at_the_first_save(tmp_path: Path) -> None:
    words = r"holds \S*test_contents\.normalizer \(at normalizers\.target\.0\), which would have to run code"
    with pytest.raises(NotSerialisable, match=words):
        fit(tmp_path, Loading)


def test_what_lightning_reads_is_refused_at_the_first_save(tmp_path: Path) -> None:
    words = r"holds \S*test_contents\.normalizer \(at optimizer_states\.0\.param_groups\.0\.normalizer\)"
    with pytest.raises(NotSerialisable, match=words):
        fit(tmp_path, optimizer=Holding)


@pytest.mark.parametrize("adapter", [[ResumeCallback()], [ResumeCheckpointIO()]], ids=["callback", "plugin"])
def test_a_checkpoint_of_bare_lightning_is_read_without_running_code(tmp_path: Path, adapter: list[Any]) -> None:
    fit(tmp_path / "whole", adapter=[])
    resumed = fit(tmp_path / "run", adapter=adapter, ckpt_path=tmp_path / "whole" / "step=4.ckpt")
    assert RUN == []
    assert resumed.global_step == 8


def test_the_plugin_alone_reads_no_object_that_lightning_uses(tmp_path: Path) -> None:
    fit(tmp_path / "whole", adapter=[], optimizer=Holding)
    words = r"it holds \S*test_contents\.normalizer at optimizer_states\.0\.param_groups\.0\.normalizer"
    with pytest.raises(CheckpointDamaged, match=words):
        fit(tmp_path / "run", adapter=[ResumeCheckpointIO()], ckpt_path=tmp_path / "whole" / "step=4.ckpt")
    assert RUN == []


def test_its_weights_are_exported(tmp_path: Path) -> None:
    module = fit(tmp_path / "run")
    export(tmp_path / "run", output=tmp_path / "weights.safetensors")
    assert RUN == []
    exported = load_file(tmp_path / "weights.safetensors")
    assert torch.equal(exported["net.weight"], module.net.weight)
