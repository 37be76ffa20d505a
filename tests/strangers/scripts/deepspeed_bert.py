"""HelloDeepSpeed: masked language modelling in bf16, ZeRO 1 with its optimizer on the CPU, masks drawn without end."""

import itertools

import deepspeed
import deepspeed_models
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import ledger

ITERATIONS, MASK, VOCABULARY = 26, 4, 64


class WikiTextMLMDataset(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        tokens = self.rows[index].clone()
        masked = torch.from_numpy(np.random.rand(len(tokens)) < 0.15)
        labels = torch.where(masked, tokens, -100)
        tokens[masked] = MASK
        return tokens, labels


class Bert(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens, labels):
        scores = self.head(self.encoder(self.embed(tokens)))
        return nn.functional.cross_entropy(scores.float().flatten(0, 1), labels.flatten())


deepspeed.init_distributed("gloo")
torch.manual_seed(42)
rows = torch.randint(5, VOCABULARY, (40, 24))
loader = DataLoader(WikiTextMLMDataset(rows), batch_size=4, shuffle=True)
model = Bert()
ds_config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
}
model, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config)
run = None
if ledger.ADAPTED:
    from resume_adapters.deepspeed import ResumeHooks

    run = ResumeHooks(model, "out", save_every=4)
model.train()
for _ in run.epochs(max_steps=ITERATIONS) if run else itertools.count():
    for tokens, labels in run.batches(loader) if run else loader:
        loss = model(tokens, labels)
        model.backward(loss)
        ledger.step(model.global_steps, loss.item(), [model.optimizer], batch=ledger.digest(tokens))
        model.step()
        if run:
            run.step(loss=loss)
        if model.global_steps >= ITERATIONS:
            break
    if model.global_steps >= ITERATIONS:
        break
deepspeed_models.end(model, 1, steps=model.global_steps)
