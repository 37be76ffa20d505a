"""Adapters of peft of the kind that ADAPTER names, trained by the bare Trainer."""

import os

import torch
from peft import LoraConfig, PrefixTuningConfig, PromptEncoderConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

set_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2, use_cache=False))
lora = LoraConfig(r=2, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
kind = os.environ.get("ADAPTER", "transformers")
if kind == "transformers":  # its own integration
    model.add_adapter(lora)
elif kind == "two":
    model = get_peft_model(model, lora)
    model.add_adapter("other", lora)
    model.base_model.set_adapter(["default", "other"])
elif kind == "prefix":
    options = {"num_virtual_tokens": 3, "encoder_hidden_size": 8}
    model = get_peft_model(model, PrefixTuningConfig(task_type="CAUSAL_LM", prefix_projection=True, **options))
else:
    options = {"num_virtual_tokens": 3, "encoder_hidden_size": 8, "encoder_reparameterization_type": kind}
    model = get_peft_model(model, PromptEncoderConfig(task_type="CAUSAL_LM", **options))
rows = torch.randint(0, 64, (80, 12), generator=torch.Generator().manual_seed(1))
data = [{"input_ids": row, "labels": row} for row in rows]
arguments = TrainingArguments(
    "out",
    per_device_train_batch_size=4,
    num_train_epochs=2,
    learning_rate=5e-2,
    save_steps=5,
    logging_steps=3,
    report_to=[],
    use_cpu=True,
)
trainer = Trainer(model, arguments, train_dataset=data)
trainer.train()
