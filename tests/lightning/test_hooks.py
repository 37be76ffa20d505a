"""An epoch begins once, in whichever launch: what a resume goes on with has had its hooks."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from resume_adapters.lightning import ResumeCallback


class Interrupted(Exception):
    pass


class Line(pl.LightningModule):
    """Counts how often an epoch begins, and is interrupted before a step."""

    def __init__(self, interrupted_at: int | None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.interrupted_at = interrupted_at
        self.begun: list[int] = []

    def on_train_epoch_start(self) -> None:
        self.begun.append(self.current_epoch)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.global_step == self.interrupted_at:
            raise Interrupted
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def launch(directory: Path, interrupted_at: int | None) -> tuple[list[int], dict[str, int]]:
    """Train; return the epochs that began in this launch, and how many there were in all, by how far they came."""
    module = Line(interrupted_at)
    trainer = pl.Trainer(
        max_epochs=3,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(dirpath=directory, every_n_train_steps=2, save_top_k=-1), ResumeCallback()],
    )
    trainer.fit(module, DataLoader(torch.rand(8, 1), batch_size=2))
    return module.begun, dict(vars(trainer.fit_loop.epoch_progress.total))


@pytest.mark.parametrize(("at", "begun"), [(7, [2]), (9, [2])], ids=["in the middle", "at the end"])
def test_an_epoch_begins_once(at: int, begun: list[int], tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        launch(tmp_path, at)
    found, counted = launch(tmp_path, None)
    assert found == begun
    assert counted == {"ready": 3, "started": 3, "processed": 3, "completed": 3}
