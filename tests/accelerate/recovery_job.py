"""A hand-written Accelerate loop in a restartable block. Started by ``recovering.results``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.utils import InitProcessGroupKwargs, set_seed

import staged
from resume_adapters.accelerate import register_for_resume

from recovering import FAULTS, RANK, Data, Net, Optimizer, ending, run_cases
from training import accelerate_shards_on_cpu, use_walled


def placement() -> dict[str, Any]:
    """Return where the state is, as the environment has it: on each process, in shards, or in a DeepSpeed engine."""
    if "FSDP" in os.environ:
        accelerate_shards_on_cpu()
        plugin: Any = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            state_dict_type=os.environ["FSDP"],
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Linear"],
            reshard_after_forward=os.environ.get("KEEPS_WHOLE") is None,
        )
        replicas = int(os.environ.get("REPLICAS", "1"))
        shards = int(os.environ["WORLD_SIZE"]) // replicas
        hybrid = {"parallelism_config": ParallelismConfig(dp_replicate_size=replicas, dp_shard_size=shards)}
        return {"fsdp_plugin": plugin, **(hybrid if replicas > 1 else {})}
    if "DEVICE" in os.environ:
        use_walled()
        return {}
    if "ZERO" not in os.environ:
        return {"cpu": True}
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # plain gloo: nothing is compiled
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": int(os.environ["ZERO"])},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    return {"deepspeed_plugin": plugin, "kwargs_handlers": [InitProcessGroupKwargs(backend="gloo")]}


def train(attempt: Any, directory: Path, steps: dict[str, Any]) -> dict[str, str]:
    accelerator = Accelerator(project_dir=directory, **placement())
    set_seed(3)
    net: Any = Net().to(accelerator.device)  # of such a device torch makes new parameters
    set_seed(3 + RANK)
    made = Optimizer(net.parameters(), 1e-2)
    schedule: Any = torch.optim.lr_scheduler.StepLR(made, 3, 0.5)
    loader: Any = torch.utils.data.DataLoader(Data(), batch_size=4, shuffle=True)
    evaluated: Any = torch.utils.data.DataLoader(Data(8, "evaluation"), batch_size=4)
    net, optimizer, loader, schedule = accelerator.prepare(net, made, loader, schedule)
    run = register_for_resume(accelerator, save_every=5, **staged.OPTIONS)
    FAULTS.step = lambda: run.global_step
    for _ in run.epochs(2):
        for x, y in run.batches(loader):
            loss = torch.nn.functional.cross_entropy(net(x), y)
            accelerator.backward(loss)
            FAULTS.at("clipped")
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            run.step(loss=loss)
            steps[str(run.global_step)] = [loss.item(), x.sum().item(), schedule.get_last_lr()[0], run.mean_loss]
            if run.global_step % 4 == 0:
                with torch.no_grad():
                    steps[f"evaluation {run.global_step}"] = [net(x).sum().item() for x, _ in evaluated]
    return ending(accelerator.unwrap_model(net), made)


run_cases(train, json.loads(sys.argv[1]))
