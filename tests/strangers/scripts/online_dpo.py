"""Preferences among generations of the model itself, adapters only; the shape of TRL's dpo_online.py."""

import datasets
from peft import LoraConfig
from trl_models import language_model

from words import sentences, tokenizer

try:
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
except ImportError:  # TRL before 0.26
    from trl import OnlineDPOConfig, OnlineDPOTrainer


def distinct(prompts, completions, **_):
    return [float(len(set(str(each).split()))) for each in completions]


trainer = OnlineDPOTrainer(
    model=language_model(),
    reward_funcs=distinct,
    args=OnlineDPOConfig(
        "out",
        per_device_train_batch_size=4,
        max_steps=14,
        save_steps=3,
        logging_steps=2,
        learning_rate=5e-3,
        max_new_tokens=8,
        max_length=32,
        missing_eos_penalty=1.0,
        report_to=[],
        use_cpu=True,
        bf16=False,
    ),
    train_dataset=datasets.Dataset.from_dict({"prompt": sentences(40, 6, 1)}),
    processing_class=tokenizer(),
    peft_config=LoraConfig(r=4, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True),
)
trainer.train()
