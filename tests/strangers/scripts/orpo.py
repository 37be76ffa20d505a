"""Preferences without a reference model; the shape of TRL's orpo.py."""

import datasets
from trl_models import language_model

from words import sentences, tokenizer

try:
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer
except ImportError:  # TRL before 0.26
    from trl import ORPOConfig, ORPOTrainer

columns = {name: sentences(60, 6, seed) for seed, name in enumerate(("prompt", "chosen", "rejected"))}
data = datasets.Dataset.from_dict(columns).train_test_split(20, seed=0)
trainer = ORPOTrainer(
    model=language_model(),
    args=ORPOConfig(
        "out",
        per_device_train_batch_size=2,
        num_train_epochs=1,
        save_steps=3,
        logging_steps=4,
        eval_strategy="steps",
        eval_steps=5,
        learning_rate=5e-3,
        max_length=32,
        disable_dropout=False,
        report_to=[],
        use_cpu=True,
        bf16=False,
    ),
    train_dataset=data["train"],
    eval_dataset=data["test"],
    processing_class=tokenizer(),
)
trainer.train()
