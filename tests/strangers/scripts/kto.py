"""Answers that are good or bad, beside a reference model; the shape of TRL's kto.py."""

import datasets
from trl import KTOConfig, KTOTrainer
from trl_models import language_model

from words import sentences, tokenizer

columns = {"prompt": sentences(60, 5, 1), "completion": sentences(60, 5, 2), "label": [at % 3 > 0 for at in range(60)]}
data = datasets.Dataset.from_dict(columns).train_test_split(20, seed=0)
trainer = KTOTrainer(
    model=language_model(),
    ref_model=language_model(),
    args=KTOConfig(
        "out",
        per_device_train_batch_size=4,
        num_train_epochs=2,
        eval_strategy="steps",
        eval_steps=4,
        save_steps=3,
        logging_steps=2,
        learning_rate=5e-3,
        max_length=32,
        report_to=[],
        use_cpu=True,
        bf16=False,
    ),
    train_dataset=data["train"],
    eval_dataset=data["test"],
    processing_class=tokenizer(),
)
trainer.train()
