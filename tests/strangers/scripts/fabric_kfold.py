"""Fabric's example of k-fold cross validation: the folds take turns in each epoch, and their loaders are made there."""

import numpy as np
import torch
import torchmetrics
from lightning.fabric import Fabric, seed_everything
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, SubsetRandomSampler

import ledger

FOLDS, EPOCHS = 3, 3
fabric = Fabric(accelerator="cpu", devices=1)
fabric.launch()
seed_everything(1)
images = torch.rand(48, 16)
dataset = torch.utils.data.TensorDataset(images, images.mean(1).argsort().argsort() % 10)


def network():
    return nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Dropout(0.25), nn.Linear(24, 10), nn.LogSoftmax(1))


models = [network() for _ in range(FOLDS)]
optimizers = [torch.optim.Adadelta(model.parameters(), lr=1.0) for model in models]
for i in range(FOLDS):
    models[i], optimizers[i] = fabric.setup(models[i], optimizers[i])
acc_metric = torchmetrics.Accuracy(task="multiclass", num_classes=10).to(fabric.device)
run = None
if ledger.ADAPTED:
    from resume_adapters.fabric import register_for_resume

    named = {f"model_{i}": model for i, model in enumerate(models)}
    named |= {f"optimizer_{i}": optimizer for i, optimizer in enumerate(optimizers)}
    run = register_for_resume(fabric, "out", save_every=7, **named)
steps = run.resume().step if run else 0
accuracies = []
for _ in run.epochs(EPOCHS) if run else range(EPOCHS):
    for fold, val_ids in enumerate(np.array_split(np.arange(48), FOLDS)):
        train_ids = np.setdiff1d(np.arange(48), val_ids)
        train_loader = DataLoader(dataset, batch_size=8, sampler=SubsetRandomSampler(train_ids))
        val_loader = DataLoader(dataset, batch_size=8, sampler=SubsetRandomSampler(val_ids))
        train_loader, val_loader = fabric.setup_dataloaders(train_loader, val_loader)
        model, optimizer = models[fold], optimizers[fold]
        model.train()
        for data, target in run.batches(train_loader) if run else train_loader:
            optimizer.zero_grad()
            loss = functional.nll_loss(model(data), target)
            fabric.backward(loss)
            optimizer.step()
            ledger.step(steps, loss.item(), [optimizer], fold=fold, batch=ledger.digest(data))
            steps += 1
            if run:
                run.step(loss=loss)
        model.eval()
        with torch.no_grad():
            for data, target in val_loader:
                acc_metric.update(model(data), target)
        accuracies.append(acc_metric.compute().item())
        acc_metric.reset()
ledger.end(models, optimizers, accuracies=accuracies[-1])
