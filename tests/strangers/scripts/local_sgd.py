"""LocalSGD as in Accelerate's example: two processes train apart, and average their weights in every third step."""

import torch
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

import ledger

set_seed(9)
x = torch.randn(88, 6)
data = TensorDataset(x, torch.sin(x.sum(1)))
accelerator = Accelerator(cpu=True, project_dir="out")
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 80)
loader = DataLoader(data, batch_size=4, shuffle=True)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

run = None
if ledger.ADAPTED:
    from resume_adapters.accelerate import register_for_resume

    run = register_for_resume(accelerator, save_every=3)  # where the averages are: the weights are alike then
steps = run.resume().step if run else 0
for _ in run.epochs(3) if run else range(3):
    model.train()
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=3) as local_sgd:
        for a, b in run.batches(loader) if run else loader:
            loss = (model(a).squeeze(1) - b).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            local_sgd.step()
            ledger.step(steps, loss.item(), [optimizer], batch=ledger.digest(a))
            steps += 1
            if run:
                run.step(loss=loss)
ledger.end([accelerator.unwrap_model(model)], [optimizer])
