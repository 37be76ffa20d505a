"""The Trainer with a DeepSpeed JSON file in which everything is "auto". Its argument is the stage of ZeRO."""

import sys

import deepspeed_models
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import ledger

stage = int(sys.argv[1])


class WrittenDown(Trainer):
    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        ledger.step(self.state.global_step, loss.item(), [self.model_wrapped.optimizer])
        return loss


args = TrainingArguments(
    "out",
    deepspeed=deepspeed_models.configuration("ds_config_auto.json", stage),
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    num_train_epochs=2,
    warmup_steps=3,
    weight_decay=0.01,
    learning_rate=5e-3,
    save_steps=3,
    logging_steps=2,
    report_to=[],
)
set_seed(0)
config = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
rows = torch.randint(0, 64, (44, 12), generator=torch.Generator().manual_seed(1))
data = [{"input_ids": row, "labels": row} for row in rows]
trainer = WrittenDown(model=GPT2LMHeadModel(config), args=args, train_dataset=data)
if ledger.ADAPTED:
    from resume_adapters.hf import ResumeCallback

    trainer.add_callback(ResumeCallback())
trainer.train()
timed = ("runtime", "per_second", "time", "total_flos")  # at stage 3 counted by what a process happens to hold
logs = [
    {name: value for name, value in entry.items() if not any(word in name for word in timed)}
    for entry in trainer.state.log_history
]
deepspeed_models.end(trainer.model_wrapped, stage, steps=trainer.state.global_step, logs=logs)
