"""What the scripts with Lightning beside this one share: data, a model, and a callback that writes down what happens.

The scripts themselves know nothing of this package: what resume-adapters env prints is the switch.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

import ledger


class Blobs(pl.LightningDataModule):
    """Points of three classes, with noise that is drawn as they are read."""

    def __init__(self, batch_size: int = 4, workers: int = 0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.batch_size, self.workers = batch_size, workers

    def rows(self, count: int, seed: int) -> list[Any]:
        generator = torch.Generator().manual_seed(seed)
        classes = torch.randint(3, (count,), generator=generator)
        return list(zip(torch.randn(count, 8, generator=generator) + classes[:, None], classes, strict=True))

    def train_dataloader(self) -> Any:
        noisy = Noisy(self.rows(44, 1))
        return torch.utils.data.DataLoader(noisy, self.batch_size, shuffle=True, num_workers=self.workers)

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.rows(20, 2), 5)


class Noisy(torch.utils.data.Dataset[Any]):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        x, y = self.rows[index]
        return x + 0.1 * torch.randn(8), y


class Classifier(pl.LightningModule):
    """A backbone and a head, with metrics of torchmetrics in training and in validation."""

    def __init__(self, lr: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.backbone = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU())
        self.head = torch.nn.Sequential(torch.nn.Dropout(0.1), torch.nn.Linear(16, 3))
        named = {
            "acc": torchmetrics.Accuracy("multiclass", num_classes=3),
            "f1": torchmetrics.F1Score("multiclass", num_classes=3),
        }
        self.train_metrics = torchmetrics.MetricCollection(named, prefix="train_")
        self.val_metrics = self.train_metrics.clone(prefix="val_")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        scores = self.head(self.backbone(x))
        loss = torch.nn.functional.cross_entropy(scores, y)
        self.train_metrics(scores, y)
        self.log_dict(self.train_metrics, on_step=False, on_epoch=True)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        scores = self.head(self.backbone(x))
        self.val_metrics(scores, y)
        self.log_dict(self.val_metrics)
        self.log("val_loss", torch.nn.functional.cross_entropy(scores, y))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=self.lr)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


class Ledger(Callback):
    """Writes down each batch, and each validation with all metrics."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trained = sum(each.requires_grad for each in pl_module.parameters())
        values = {"batch": ledger.digest(batch[0]), "trained": trained, "epoch": trainer.current_epoch}
        ledger.step(trainer.global_step, outputs["loss"].item(), trainer.optimizers, **values)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            values = {name: value.item() for name, value in sorted(trainer.callback_metrics.items())}
            ledger.write(f"validation {trainer.current_epoch} {trainer.global_step}", values)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        values = {name: value.item() for name, value in sorted(trainer.callback_metrics.items())}
        ledger.write(f"epoch {trainer.current_epoch}", values)


def checkpoints(**options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(**{"dirpath": "out", "every_n_train_steps": 3, "save_top_k": -1, **options})


def fit(trainer: Any, model: Any, data: Any) -> None:
    trainer.fit(model, datamodule=data)
    end(trainer, model)


def end(trainer: Any, model: Any, **values: Any) -> None:
    kept = [each for each in trainer.checkpoint_callbacks if each.monitor]
    best = [
        [each.best_model_score and each.best_model_score.item(), os.path.basename(each.best_model_path)]
        for each in kept
    ]
    patience = [getattr(each, "wait_count", None) for each in trainer.callbacks if hasattr(each, "wait_count")]
    steps = {"steps": trainer.global_step, "epochs": trainer.current_epoch, "best": best, "patience": patience}
    ledger.end([model], trainer.optimizers, **steps, **values)


def trainer(*callbacks: Any, **options: Any) -> Any:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    pl.seed_everything(3)
    return pl.Trainer(accelerator="cpu", callbacks=[*callbacks, Ledger()], **{**quiet, **options})


ARGUMENTS = sys.argv[1:]
