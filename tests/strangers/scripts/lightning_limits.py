"""A callback that lets the training go on for longer, as one that finds its loss still falling."""

from typing import Any

import lightning_models
from lightning.pytorch.callbacks import Callback


class Longer(Callback):
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            trainer.fit_loop.max_epochs = 5


trainer = lightning_models.trainer(Longer(), lightning_models.checkpoints(), max_epochs=3)
lightning_models.fit(trainer, lightning_models.Classifier(), lightning_models.Blobs())
