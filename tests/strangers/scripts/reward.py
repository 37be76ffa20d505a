"""A reward model of pairs; the shape of TRL's reward_modeling.py."""

import datasets
from transformers import GPT2ForSequenceClassification, set_seed
from trl import RewardConfig, RewardTrainer
from trl_models import language_model

from words import sentences, tokenizer

config = language_model().config
config.num_labels = 1
set_seed(0)
columns = {name: sentences(60, 6, seed) for seed, name in enumerate(("prompt", "chosen", "rejected"))}
data = datasets.Dataset.from_dict(columns).train_test_split(20, seed=0)
trainer = RewardTrainer(
    model=GPT2ForSequenceClassification(config),
    args=RewardConfig(
        "out",
        per_device_train_batch_size=4,
        num_train_epochs=2,
        eval_strategy="steps",
        eval_steps=4,
        save_steps=4,
        logging_steps=3,
        learning_rate=5e-3,
        max_length=32,
        center_rewards_coefficient=0.01,
        load_best_model_at_end=True,
        report_to=[],
        use_cpu=True,
        bf16=False,
    ),
    train_dataset=data["train"],
    eval_dataset=data["test"],
    processing_class=tokenizer(),
)
trainer.train()
