"""Accelerate with a DeepSpeed JSON file in which everything is "auto". Its argument is the stage of ZeRO."""

import sys

import deepspeed_models
import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import DummyOptim, DummyScheduler, InitProcessGroupKwargs

import ledger

stage = int(sys.argv[1])
config = deepspeed_models.configuration("ds_config_auto.json", stage)
plugin = DeepSpeedPlugin(hf_ds_config=config, gradient_accumulation_steps=2, gradient_clipping=1.0)
accelerator = Accelerator(
    deepspeed_plugin=plugin,
    gradient_accumulation_steps=2,
    kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
    project_dir="out",
)
model = deepspeed_models.network()
model.config = type("Config", (), {"hidden_size": 16})()  # what "auto" sizes of buckets are computed from
optimizer = DummyOptim(model.parameters(), lr=1e-2, weight_decay=0.01)
schedule = DummyScheduler(optimizer, total_num_steps=22, warmup_num_steps=4)
loader = torch.utils.data.DataLoader(deepspeed_models.dataset(), batch_size=4, shuffle=True)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
run = None
if ledger.ADAPTED:
    from resume_adapters.accelerate import register_for_resume

    run = register_for_resume(accelerator, save_every=3)
for _ in run.epochs(4) if run else range(4):
    model.train()
    for x, y in run.batches(loader) if run else loader:
        with accelerator.accumulate(model):
            steps = model.global_steps
            loss = (model(x).sum(1) - y).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        ledger.step(steps, loss.item(), [model.optimizer], batch=ledger.digest(x))
        if run:
            run.step(loss=loss)
deepspeed_models.end(model, stage, steps=model.global_steps, lr=model.get_lr())
