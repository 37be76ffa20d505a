"""A script that draws its batches by ``next``, as the trainer of denoising-diffusion-pytorch does."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

import ledger

gradient_accumulate_every, train_num_steps = 2, 24


def cycle(dl):
    while True:
        yield from dl


set_seed(7)
images = torch.randn(20, 6)
accelerator = Accelerator(cpu=True, project_dir="out")
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 6))
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(images), batch_size=4, shuffle=True)
model, opt, loader = accelerator.prepare(model, opt, loader)
step, run = 0, None
if ledger.ADAPTED:
    from resume_adapters.accelerate import register_for_resume

    run = register_for_resume(accelerator, save_every=3)
    step = run.resume(loader).step
dl = cycle(loader)
while step < train_num_steps:
    total_loss, drawn = 0.0, []
    for _ in range(gradient_accumulate_every):
        (data,) = next(dl)
        drawn.append(ledger.digest(data))
        noise = torch.randn_like(data)
        loss = (model(data + noise) - noise).square().mean() / gradient_accumulate_every
        total_loss += loss.item()
        accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    ledger.step(step, total_loss, [opt], batch=drawn)
    opt.step()
    opt.zero_grad()
    if run:
        run.step(loss=total_loss)
    step += 1
if run:
    run.finish()
ledger.end([model], [opt])
