"""A hand-written Fabric loop in a restartable block. Started by ``recovering.results``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.accelerators import Accelerator
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

import staged
from resume_adapters.fabric import register_for_resume

from recovering import FAULTS, RANK, Data, Net, Optimizer, ending, run_cases
from training import use_walled


def spread(model: Any, mesh: Any) -> Any:
    for part in (model.first, model):
        fully_shard(part, mesh=mesh["data_parallel"])
    return model


def train(attempt: Any, directory: Path, steps: dict[str, Any]) -> dict[str, str]:
    ranks = int(os.environ["WORLD_SIZE"])
    accelerator: Any = "cpu"
    strategy: Any = DDPStrategy(process_group_backend="gloo")
    if "SHARDS" in os.environ:
        strategy = ModelParallelStrategy(spread, ranks, 1, os.environ["SHARDS"] == "sharded", "gloo")
    if "DEVICE" in os.environ:
        use_walled()
        from device.walled import lightning_accelerator, lightning_ddp

        accelerator, strategy = lightning_accelerator(Accelerator), lightning_ddp(DDPStrategy, ranks)
    fabric = Fabric(accelerator=accelerator, devices=ranks, strategy=strategy)
    fabric.launch()
    torch.manual_seed(3 + RANK)
    model = Net().to(fabric.device)  # of such a device torch makes new parameters
    net = fabric.setup_module(model)
    made = Optimizer(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(made, 3, 0.5)
    optimizer = fabric.setup_optimizers(made)
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(Data(), batch_size=4, shuffle=True))
    saved = {"model": net, "optimizer": optimizer, "schedule": schedule}
    run = register_for_resume(fabric, directory, save_every=5, **staged.OPTIONS, **saved)
    FAULTS.step = lambda: run.global_step
    for _ in run.epochs(2):
        for x, y in run.batches(loader):
            loss = torch.nn.functional.cross_entropy(net(x), y)
            fabric.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            run.step(loss=loss)
            steps[str(run.global_step)] = [loss.item(), x.sum().item(), schedule.get_last_lr()[0], run.mean_loss]
    return ending(model, made)


run_cases(train, json.loads(sys.argv[1]))
