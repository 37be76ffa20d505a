"""A curriculum: each epoch has a loader of its own, over more and harder samples, made and prepared when it begins."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Subset, TensorDataset

import ledger

set_seed(4)
x = torch.randn(60, 6)
y = torch.sin(x.sum(1))
difficulty = x.norm(dim=1).argsort().tolist()
data = TensorDataset(x, y)
accelerator = Accelerator(cpu=True, project_dir="out")
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)

run = None
if ledger.ADAPTED:
    from resume_adapters.accelerate import register_for_resume

    run = register_for_resume(accelerator, save_every=5)
for epoch in run.epochs(4) if run else range(4):
    share = (epoch + 1) / 4
    subset = Subset(data, difficulty[: int(60 * share)])
    loader = accelerator.prepare(DataLoader(subset, batch_size=4, shuffle=True, num_workers=epoch % 2))
    model.train()
    for a, b in run.batches(loader) if run else loader:
        steps = int(optimizer.state_dict()["state"].get(0, {"step": 0})["step"])
        loss = (model(a).squeeze(1) - b).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        ledger.step(steps, loss.item(), [optimizer], epoch=epoch, batch=ledger.digest(a))
        if run:
            run.step(loss=loss)
    schedule.step()
ledger.end([model], [optimizer], schedule=schedule.state_dict()["last_epoch"])
