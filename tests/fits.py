"""What tests that fit in their own process share: a small trainer, and a module that is interrupted before a step."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch


class Interrupted(Exception):
    pass


def trainer_of(*callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    """Return a trainer that prints nothing."""
    quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(**{"callbacks": [*callbacks], **quiet, **options})


class Line(pl.LightningModule):
    """A layer of one weight; its fit is interrupted before a step."""

    def __init__(self, interrupted_at: int | None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.interrupted_at = interrupted_at

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.global_step == self.interrupted_at:
            raise Interrupted
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)
