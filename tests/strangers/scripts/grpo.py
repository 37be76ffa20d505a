"""Rewards of generations that are buffered for several steps; the shape of TRL's grpo.py."""

import datasets
from trl import GRPOConfig, GRPOTrainer
from trl_models import language_model

from words import sentences, tokenizer


def distinct(completions, **_):
    return [float(len(set(each.split()))) for each in completions]


trainer = GRPOTrainer(
    model=language_model(),
    reward_funcs=distinct,
    args=GRPOConfig(
        "out",
        per_device_train_batch_size=4,
        max_steps=14,
        save_steps=3,
        logging_steps=2,
        learning_rate=5e-3,
        num_generations=4,
        steps_per_generation=4,
        max_completion_length=8,
        report_to=[],
        use_cpu=True,
        bf16=False,
    ),
    train_dataset=datasets.Dataset.from_dict({"prompt": sentences(40, 6, 1)}),
    processing_class=tokenizer(),
)
trainer.train()
