"""Fine-tuning with an average that is corrected by the first weights: TRL's BEMACallback."""

import datasets
from trl import BEMACallback, SFTConfig, SFTTrainer
from trl_models import language_model

from words import sentences, tokenizer

trainer = SFTTrainer(
    model=language_model(),
    args=SFTConfig(
        "out",
        per_device_train_batch_size=2,
        max_steps=20,
        save_steps=3,
        logging_steps=2,
        learning_rate=5e-3,
        max_length=16,
        report_to=[],
        use_cpu=True,
        bf16=False,
    ),
    train_dataset=datasets.Dataset.from_dict({"text": sentences(80, 10, 1)}),
    processing_class=tokenizer(),
    callbacks=[BEMACallback(update_freq=2)],
)
trainer.train()
