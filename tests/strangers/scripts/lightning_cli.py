"""A script of LightningCLI, with a logger whose version is fixed: its config is written at each launch."""

import lightning_models
from lightning.pytorch.cli import LightningCLI

arguments = ["fit", "--config", "config.yaml"]
with open("config.yaml", "w") as file:
    file.write("""
seed_everything: 5
trainer:
  accelerator: cpu
  max_epochs: 3
  enable_progress_bar: false
  enable_model_summary: false
  logger:
    class_path: lightning.pytorch.loggers.CSVLogger
    init_args: {save_dir: logs, name: cli, version: fixed}
  callbacks:
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args: {every_n_train_steps: 3, save_top_k: -1}
    - class_path: lightning_models.Ledger
model: {lr: 0.02}
data: {batch_size: 4}
""")
cli = LightningCLI(lightning_models.Classifier, lightning_models.Blobs, args=arguments)
lightning_models.end(cli.trainer, cli.model)
