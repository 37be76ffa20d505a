"""Accelerate's example of DDP's communication hooks, on two processes. Its argument is the hook."""

import sys

import torch
from accelerate import Accelerator, DDPCommunicationHookType, DistributedDataParallelKwargs
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

import ledger

hook = DDPCommunicationHookType(sys.argv[1])
options = {"start_powerSGD_iter": 3, "matrix_approximation_rank": 1} if "power" in sys.argv[1] else {}
ddp_kwargs = DistributedDataParallelKwargs(comm_hook=hook, comm_state_option=options)
accelerator = Accelerator(cpu=True, project_dir="out", kwargs_handlers=[ddp_kwargs])
set_seed(42)
x = torch.randn(96, 16)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(x, x.sum(1)), shuffle=True, batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
run = None
if ledger.ADAPTED:
    from resume_adapters.accelerate import register_for_resume

    run = register_for_resume(accelerator, save_every=4)
for _ in run.epochs(2) if run else range(2):
    for a, b in run.batches(loader) if run else loader:
        steps = int(optimizer.state_dict()["state"].get(0, {"step": 0})["step"])
        loss = (model(a).squeeze(1) - b).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        ledger.step(steps, loss.item(), [optimizer], batch=ledger.digest(a))
        if run:
            run.step(loss=loss)
ledger.end([accelerator.unwrap_model(model)], [optimizer])
