"""Fabric's example of meta learning: tasks are drawn, a copy of the weights adapts to each, and no loader is read."""

import torch
from lightning.fabric import Fabric, seed_everything
from torch import nn
from torch.func import functional_call

import ledger

ITERATIONS, TASKS, FAST = 24, 3, 0.5
fabric = Fabric(accelerator="cpu", devices=1)
fabric.launch()
seed_everything(42 + fabric.global_rank)
model, optimizer = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 1)), None
model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), 0.003))


def sample():
    x = torch.rand(10, 1) * 6 - 3
    return x, torch.rand(1) * torch.sin(x + torch.rand(1) * 3)


def fast_adapt(x, y):
    weights = dict(model.module.named_parameters())
    error = (functional_call(model.module, weights, (x[::2],)) - y[::2]).square().mean()
    gradients = torch.autograd.grad(error, list(weights.values()), create_graph=True)
    adapted = {name: each - FAST * g for (name, each), g in zip(weights.items(), gradients, strict=True)}
    return (functional_call(model.module, adapted, (x[1::2],)) - y[1::2]).square().mean()


run = None
if ledger.ADAPTED:
    from resume_adapters.fabric import register_for_resume

    run = register_for_resume(fabric, "out", save_every=4, model=model, optimizer=optimizer)
for iteration in range(run.resume().step if run else 0, ITERATIONS):
    optimizer.zero_grad()
    meta_train_error = 0.0
    for _ in range(TASKS):
        evaluation_error = fast_adapt(*sample())
        fabric.backward(evaluation_error)
        meta_train_error += evaluation_error.item()
        fast_adapt(*sample())
    for p in model.parameters():
        p.grad.data.mul_(1.0 / TASKS)
    ledger.step(iteration, meta_train_error / TASKS, [optimizer])
    optimizer.step()
    if run:
        run.step(loss=meta_train_error / TASKS)
if run:
    run.finish()
ledger.end([model], [optimizer])
