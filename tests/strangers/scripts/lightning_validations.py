"""Two validations in each epoch, torchmetrics, early stopping, the best checkpoints, a CSV and a TensorBoard logger."""

from pathlib import Path

import lightning_models
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

import ledger

callbacks = [
    lightning_models.checkpoints(
        monitor="val_loss", save_top_k=2, every_n_train_steps=None, filename="{step}-{val_loss:.4f}"
    ),
    lightning_models.checkpoints(),
    EarlyStopping("val_f1", mode="max", patience=4),
    LearningRateMonitor(),
]
loggers = [CSVLogger("logs", version="fixed", flush_logs_every_n_steps=2), TensorBoardLogger("board", version="fixed")]
trainer = lightning_models.trainer(
    *callbacks, max_epochs=5, val_check_interval=0.5, logger=loggers, log_every_n_steps=1
)
model = lightning_models.Classifier()
lightning_models.fit(trainer, model, lightning_models.Blobs())
rows = Path("logs/lightning_logs/fixed/metrics.csv").read_text().splitlines()
lightning_models.end(trainer, model, rows=rows, board=ledger.scalars("board"))
