"""The loop of timm's train.py, with Accelerate: a cosine schedule with noise, set by epochs and by updates."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from timm.scheduler import create_scheduler_v2
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ledger

EPOCHS = 4
set_seed(3)
images = torch.rand(44, 16)
accelerator = Accelerator(cpu=True, project_dir="out")
model = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.05)
loader = DataLoader(TensorDataset(images, images.argmax(1) % 4), batch_size=4, shuffle=True)
updates = len(loader)
lr_scheduler, num_epochs = create_scheduler_v2(
    optimizer,
    sched="cosine",
    num_epochs=EPOCHS,
    warmup_epochs=1,
    warmup_lr=1e-5,
    noise=(0.3, 0.9),
    step_on_epochs=False,
    updates_per_epoch=updates,
)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
run = None
if ledger.ADAPTED:
    from resume_adapters.accelerate import register_for_resume

    run = register_for_resume(accelerator, save_every=4)
num_updates = run.resume().step if run else 0
for epoch in run.epochs(EPOCHS) if run else range(EPOCHS):
    model.train()
    for x, y in run.batches(loader) if run else loader:
        loss = nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        ledger.step(num_updates, loss.item(), [optimizer], batch=ledger.digest(x))
        optimizer.step()
        optimizer.zero_grad()
        num_updates += 1
        lr_scheduler.step_update(num_updates=num_updates)
        if run:
            run.step(loss=loss)
    lr_scheduler.step(epoch + 1)
ledger.end([model], [optimizer], schedule=lr_scheduler.state_dict())
