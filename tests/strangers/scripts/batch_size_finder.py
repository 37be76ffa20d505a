"""Accelerate's example of automatic gradient accumulation: it tries half the batch size after running out of memory.

A launch that resumes begins with the batch size that was found.
"""

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size, set_seed
from torch.utils.data import DataLoader, TensorDataset

import ledger

OBSERVED, EPOCHS = 16, 3
FOUND = Path("batch_size")
accelerator = Accelerator(cpu=True, project_dir="out")


@find_executable_batch_size(starting_batch_size=int(FOUND.read_text()) if FOUND.exists() else OBSERVED)
def inner_training_loop(batch_size):
    accelerator.gradient_accumulation_steps = OBSERVED // batch_size
    accelerator.free_memory()
    set_seed(42)
    x = torch.randn(88, 6)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.1), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=1e-2)
    train_dataloader = DataLoader(TensorDataset(x, x.sum(1)), shuffle=True, batch_size=batch_size)
    lr_scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, len(train_dataloader) * EPOCHS)
    model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, lr_scheduler
    )
    run = None
    if ledger.ADAPTED:
        from resume_adapters.accelerate import register_for_resume

        run = register_for_resume(accelerator, save_every=2)
    for _ in run.epochs(EPOCHS) if run else range(EPOCHS):
        model.train()
        for batch, y in run.batches(train_dataloader) if run else train_dataloader:
            with accelerator.accumulate(model):
                steps = int(optimizer.state_dict()["state"].get(0, {"step": 0})["step"])
                loss = (model(batch).squeeze(1) - y).square().mean()
                if batch_size > 4:
                    raise RuntimeError("CUDA out of memory.")
                accelerator.backward(loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            ledger.step(steps, loss.item(), [optimizer], batch=ledger.digest(batch))
            FOUND.write_text(str(batch_size))
            if run:
                run.step(loss=loss)
    ledger.end([model], [optimizer], schedule=lr_scheduler.state_dict())


inner_training_loop()
