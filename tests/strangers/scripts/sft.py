"""Supervised fine-tuning of adapters on packed text; the shape of TRL's sft.py."""

import datasets
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
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
        packing=True,
        report_to=[],
        use_cpu=True,
        bf16=False,
    ),
    train_dataset=datasets.Dataset.from_dict({"text": sentences(80, 10, 1)}),
    processing_class=tokenizer(),
    peft_config=LoraConfig(r=4, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True),
)
trainer.train()
