"""Accelerate's example of cross validation: a model, an optimizer and loaders for each fold, one after the other."""

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Subset, TensorDataset

import ledger

FOLDS, EPOCHS, UPDATES = 3, 2, 10
set_seed(42)
x = torch.randn(60, 6)
data = TensorDataset(x, (x.sum(1) > 0).long())
test_data = TensorDataset(torch.randn(12, 6))
accelerator = Accelerator(cpu=True, project_dir="out")
test_predictions, optimizers, models = [], [], []
for fold, held_out in enumerate(np.array_split(np.arange(60), FOLDS)):
    set_seed(42 + fold)  # a launch that resumes does not draw for the folds that are done
    train_indices = np.setdiff1d(np.arange(60), held_out)
    train_dataloader = DataLoader(Subset(data, train_indices.tolist()), shuffle=True, batch_size=4)
    eval_dataloader = DataLoader(Subset(data, held_out.tolist()), batch_size=8)
    test_dataloader = DataLoader(test_data, batch_size=8)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.1), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=1e-2)
    lr_scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, UPDATES * EPOCHS)
    models.append(model)
    model, optimizer, train_dataloader, eval_dataloader, test_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, test_dataloader, lr_scheduler
    )
    optimizers.append(optimizer)
    run = None
    if ledger.ADAPTED:
        from resume_adapters.accelerate import register_for_resume

        run = register_for_resume(accelerator, run_dir=f"out/fold-{fold}", save_every=4)
    for _ in run.epochs(EPOCHS) if run else range(EPOCHS):
        model.train()
        for batch, labels in run.batches(train_dataloader) if run else train_dataloader:
            steps = fold * 20 + int(optimizer.state_dict()["state"].get(0, {"step": 0})["step"])
            loss = torch.nn.functional.cross_entropy(model(batch), labels)
            accelerator.backward(loss)
            ledger.step(steps, loss.item(), [optimizer], batch=ledger.digest(batch))
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            if run:
                run.step(loss=loss)
        model.eval()
        for batch, _ in eval_dataloader:
            with torch.no_grad():
                accelerator.gather_for_metrics(model(batch).argmax(dim=-1))
    fold_predictions = []
    model.eval()
    for (batch,) in test_dataloader:
        with torch.no_grad():
            fold_predictions.append(accelerator.gather_for_metrics(model(batch)))
    test_predictions.append(torch.cat(fold_predictions))
    model, optimizer = accelerator.free_memory(model, optimizer)
predictions = torch.stack(test_predictions).sum(dim=0).div(FOLDS).tolist()
ledger.end(models, optimizers, predictions=predictions)
