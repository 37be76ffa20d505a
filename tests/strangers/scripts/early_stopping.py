"""Accelerate's example of early stopping: a trigger that any process sets, and a patience, kept in ``run.memory``."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

import ledger


class EarlyStoppingCallback:
    def __init__(self, memory, min_delta=0.0, patience=6):
        self.memory, self.min_delta, self.patience = memory, min_delta, patience
        memory.setdefault("counter", 0)
        memory.setdefault("lowest_loss", float("inf"))

    def check_early_stopping(self, loss):
        if self.memory["lowest_loss"] - loss >= self.min_delta:
            self.memory["lowest_loss"], self.memory["counter"] = loss, 0
            return False
        self.memory["counter"] += 1
        return self.memory["counter"] >= self.patience


set_seed(3)
x = torch.randn(60, 6)
accelerator = Accelerator(cpu=True, project_dir="out", gradient_accumulation_steps=1)
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 80)
loader = DataLoader(TensorDataset(x, torch.sin(x.sum(1))), batch_size=4, shuffle=True)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

run = None
if ledger.ADAPTED:
    from resume_adapters.accelerate import register_for_resume

    run = register_for_resume(accelerator, save_every=4)
steps = run.resume().step if run else 0
callback = EarlyStoppingCallback(run.memory if run else {})
for _ in run.epochs(8) if run else range(8):
    model.train()
    for a, b in run.batches(loader) if run else loader:
        loss = (model(a).squeeze(1) - b).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        ledger.step(steps, loss.item(), [optimizer], batch=ledger.digest(a))
        steps += 1
        if callback.check_early_stopping(loss.item()):
            accelerator.set_trigger()
        if run:
            run.step(loss=loss)
        if accelerator.check_trigger():
            break
    else:
        continue
    break
if run:
    run.finish()
assert steps < 8 * len(loader), "it stops early"
ledger.end([model], [optimizer], steps=steps, counter=callback.memory["counter"])
