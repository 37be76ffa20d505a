"""A script that counts its own windows by the batch of the epoch, as transformers' no_trainer examples do."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

import ledger

gradient_accumulation_steps = 3
set_seed(7)
x = torch.randn(44, 6)
data = TensorDataset(x, x.sum(1).cos())
accelerator = Accelerator(cpu=True, project_dir="out")
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(data, batch_size=4, shuffle=True)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-2, total_steps=30)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

run = None
if ledger.ADAPTED:
    from resume_adapters.accelerate import register_for_resume

    run = register_for_resume(accelerator, save_every=3)
for _ in run.epochs(4) if run else range(4):
    model.train()
    for step, (a, b) in run.enumerate(loader) if run else enumerate(loader):
        steps = int(optimizer.state_dict()["state"].get(0, {"step": 0})["step"])
        loss = (model(a).squeeze(1) - b).square().mean()
        accelerator.backward(loss / gradient_accumulation_steps)
        ledger.step(steps, loss.item(), [optimizer], index=step)
        if step % gradient_accumulation_steps == 0 or step == len(loader) - 1:
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if run:
            run.step(loss=loss)
ledger.end([model], [optimizer], schedule=schedule.state_dict()["last_epoch"])
