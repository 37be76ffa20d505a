"""A model that FSDP2 shards over two processes, on CPUs, with its best weights at the end; the shape of run_clm.py."""

import os

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType

os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
# Accelerate takes processes on CPUs for DDP alone.
PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)

from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed  # noqa: E402

set_seed(0)
sizes = {"vocab_size": 64, "n_positions": 12, "n_embd": 16, "n_layer": 2, "n_head": 2}
config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False)
rows = torch.randint(0, 64, (100, 12), generator=torch.Generator().manual_seed(1))
data = [{"input_ids": row, "labels": row} for row in rows]
sharding = {
    "fsdp_version": 2,
    "state_dict_type": os.environ.get("STATE_DICT_TYPE", "SHARDED_STATE_DICT"),
    "transformer_layer_cls_to_wrap": ["GPT2Block"],
}
trainer = Trainer(
    model=GPT2LMHeadModel(config),
    args=TrainingArguments(
        "out",
        per_device_train_batch_size=4,
        num_train_epochs=2,
        learning_rate=5e-2,
        eval_strategy="steps",
        eval_steps=3,
        save_steps=3,
        load_best_model_at_end=True,
        logging_steps=2,
        report_to=[],
        fsdp="full_shard",
        fsdp_config=sharding,
    ),
    train_dataset=data[:80],
    eval_dataset=data[80:],
)
trainer.train()
