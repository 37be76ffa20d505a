"""A mixture of experts, trained by the bare Trainer; the shape of transformers' run_clm.py."""

import torch
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments, set_seed

set_seed(0)
config = MixtralConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    num_local_experts=4,
    attention_dropout=0.1,
)
rows = torch.randint(0, 64, (80, 12), generator=torch.Generator().manual_seed(1))
data = [{"input_ids": row, "labels": row} for row in rows]
trainer = Trainer(
    model=MixtralForCausalLM(config),
    args=TrainingArguments(
        "out",
        per_device_train_batch_size=4,
        num_train_epochs=2,
        learning_rate=5e-3,
        save_steps=5,
        logging_steps=3,
        report_to=[],
        use_cpu=True,
    ),
    train_dataset=data,
)
trainer.train()
trainer.save_model("final")
