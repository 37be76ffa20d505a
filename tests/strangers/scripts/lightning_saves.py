"""A callback that saves by itself into the directory of the checkpoints, within steps and at the ends of epochs."""

from typing import Any

import lightning_models
from lightning.pytorch.callbacks import Callback


class Saving(Callback):
    """Saves the whole state where a framework has no checkpoint."""

    def save(self, trainer: Any, name: str) -> None:
        trainer.save_checkpoint(f"out/{name}-{trainer.global_step}.ckpt")

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step % 4 == 1:
            self.save(trainer, "within")

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.save(trainer, "start")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.save(trainer, "end")


trainer = lightning_models.trainer(Saving(), lightning_models.checkpoints(every_n_train_steps=9), max_epochs=4)
lightning_models.fit(trainer, lightning_models.Classifier(), lightning_models.Blobs())
