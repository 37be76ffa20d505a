"""Preferences, with a reference model that follows the trained one; the shape of TRL's dpo.py."""

import datasets
from trl import DPOConfig, DPOTrainer
from trl_models import language_model

from words import sentences, tokenizer

columns = {name: sentences(40, 6, seed) for seed, name in enumerate(("prompt", "chosen", "rejected"))}
trainer = DPOTrainer(
    model=language_model(),
    ref_model=language_model(),
    args=DPOConfig(
        "out",
        per_device_train_batch_size=2,
        max_steps=16,
        save_steps=3,
        logging_steps=2,
        learning_rate=5e-3,
        max_length=32,
        sync_ref_model=True,
        ref_model_sync_steps=2,
        report_to=[],
        use_cpu=True,
        bf16=False,
    ),
    train_dataset=datasets.Dataset.from_dict(columns),
    processing_class=tokenizer(),
)
trainer.train()
