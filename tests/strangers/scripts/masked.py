"""Masked words in batches of like length, with noise and a plateau; the shape of transformers' run_mlm.py."""

import random

import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
    set_seed,
)

from words import VOCABULARY, tokenizer

set_seed(0)
sizes = {"vocab_size": len(VOCABULARY), "hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 32}
model = BertForMaskedLM(BertConfig(**sizes, num_hidden_layers=2, num_attention_heads=2, pad_token_id=0))
words = tokenizer()
words.mask_token = "<unk>"
drawn = random.Random(1)
rows = [{"input_ids": drawn.choices(range(3, len(VOCABULARY)), k=drawn.randint(4, 14))} for _ in range(120)]


class Masked(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


grouped = "train_sampling_strategy" if hasattr(TrainingArguments, "train_sampling_strategy") else "group_by_length"
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        "out",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        learning_rate=2e-2,
        optim="adafactor",
        lr_scheduler_type="reduce_lr_on_plateau",
        lr_scheduler_kwargs={"patience": 0, "factor": 0.7},
        neftune_noise_alpha=2.0,
        label_smoothing_factor=0.1,
        eval_strategy="steps",
        eval_steps=3,
        save_steps=3,
        logging_steps=2,
        dataloader_num_workers=2,
        dataloader_persistent_workers=True,
        include_num_input_tokens_seen=True,
        load_best_model_at_end=True,
        report_to=[],
        use_cpu=True,
        **{grouped: "group_by_length" if grouped == "train_sampling_strategy" else True},
    ),
    train_dataset=Masked(rows[:100]),
    eval_dataset=Masked(rows[100:]),
    data_collator=DataCollatorForLanguageModeling(words, mlm_probability=0.3, seed=5),
)
trainer.train()
trainer.save_model("final")
