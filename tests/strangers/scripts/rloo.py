"""Rewards of generations, each compared with the others of its prompt, twice; the shape of TRL's rloo.py."""

import datasets
from trl import RLOOConfig, RLOOTrainer
from trl_models import language_model

from words import sentences, tokenizer


def distinct(completions, **_):
    return [float(len(set(each.split()))) for each in completions]


language_model().save_pretrained("base")
trainer = RLOOTrainer(
    model="base",  # it makes its reference model from there
    reward_funcs=[distinct, lambda completions, **_: [len(each) / 10 for each in completions]],
    args=RLOOConfig(
        "out",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=12,
        save_steps=2,
        logging_steps=1,
        learning_rate=5e-3,
        num_generations=4,
        num_iterations=2,
        beta=0.1,
        sync_ref_model=True,
        ref_model_sync_steps=3,
        max_completion_length=8,
        eval_strategy="steps",
        eval_steps=5,
        per_device_eval_batch_size=4,
        report_to=[],
        use_cpu=True,
        bf16=False,
    ),
    train_dataset=datasets.Dataset.from_dict({"prompt": sentences(40, 6, 1)}),
    eval_dataset=datasets.Dataset.from_dict({"prompt": sentences(8, 6, 2)}),
    processing_class=tokenizer(),
)
trainer.train()
