"""Finders of Lightning, as its documentation uses them. Its argument says which."""

import lightning.pytorch as pl
import lightning_models
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.tuner import Tuner

(which,) = lightning_models.ARGUMENTS
finders = {
    "LearningRateFinder": [LearningRateFinder(num_training_steps=8)],
    "BatchSizeFinder": [BatchSizeFinder(max_trials=2, steps_per_trial=1, init_val=2)],
}
trainer = lightning_models.trainer(lightning_models.checkpoints(), *finders.get(which, ()), max_epochs=3)
model, data = lightning_models.Classifier(), lightning_models.Blobs()
if which == "lr_find":
    Tuner(trainer).lr_find(model, datamodule=data, num_training=8)
elif which == "scale_batch_size":
    Tuner(trainer).scale_batch_size(model, datamodule=data, max_trials=2, steps_per_trial=1, init_val=2)
pl.seed_everything(4)
lightning_models.fit(trainer, model, data)
