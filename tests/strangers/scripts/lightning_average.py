"""An average of the weights, validated with, as in Lightning's documentation of WeightAveraging."""

import lightning_models
from lightning.pytorch.callbacks import EMAWeightAveraging

average = EMAWeightAveraging(decay=0.9, update_every_n_steps=2)
trainer = lightning_models.trainer(lightning_models.checkpoints(), average, max_epochs=4)
lightning_models.fit(trainer, lightning_models.Classifier(), lightning_models.Blobs(workers=1))
