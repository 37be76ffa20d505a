"""A hand-written DeepSpeed loop in a restartable block. Started by ``recovering.results``.

The environment has its settings, as JSON. It accumulates the gradients of two batches.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

import staged
from resume_adapters.deepspeed import ResumeHooks
from waiting import until

from recovering import FAULTS, RANK, Data, Net, Optimizer, ending, run_cases
from training import deepspeed_on_cpu

DEFAULTS: dict[str, Any] = {"stage": 0, "precision": "fp32", "offload": False, "workers": 0, "block": {}}
SETTINGS = {**DEFAULTS, **json.loads(os.environ.get("JOB", "{}"))}
STAGE = SETTINGS["stage"]
KIND = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[SETTINGS["precision"]]


class Model(Net):
    def __init__(self) -> None:
        FAULTS.at("build")
        super().__init__()
        if KIND is not torch.float32:  # a CPU normalises no batches in half precision
            self.norm: Any = torch.nn.Identity()


def config() -> dict[str, Any]:
    # Each rank has a shard of all but the smallest of ZeRO 3's weights.
    zero: dict[str, Any] = {"stage": STAGE, "stage3_param_persistence_threshold": 40}
    if SETTINGS["offload"]:
        zero["offload_optimizer"] = {"device": "cpu"}
    found = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "steps_per_print": 10000,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if SETTINGS["precision"] == "bf16":
        found["bf16"] = {"enabled": True}
    if SETTINGS["precision"] == "fp16":  # a scale that overflows, and grows again
        found["fp16"] = {"enabled": True, "initial_scale_power": 26, "loss_scale_window": 4, "hysteresis": 1}
    return found


def train(attempt: Any, directory: Path, steps: dict[str, Any]) -> dict[str, str]:
    FAULTS.step = lambda: 0
    torch.manual_seed(3 + RANK)
    with deepspeed.zero.Init(config_dict_or_path=config()) if STAGE == 3 else contextlib.nullcontext():
        model = Model()
    engine, _, _, schedule = deepspeed.initialize(
        model=model,
        optimizer=Optimizer(model.parameters(), 1e-2),
        lr_scheduler=lambda made: torch.optim.lr_scheduler.StepLR(made, 3, 0.5),
        config=config(),
    )
    native = engine.save_checkpoint

    def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
        FAULTS.at("save")
        return native(*args, **kwargs)

    engine.save_checkpoint = save_checkpoint
    loader: Any = torch.utils.data.DataLoader(Data(), 4, shuffle=True, num_workers=SETTINGS["workers"])
    evaluated: Any = torch.utils.data.DataLoader(Data(8, "evaluation"), batch_size=4)
    run = ResumeHooks(engine, directory, save_every=5, **staged.OPTIONS)
    FAULTS.step = lambda: run.global_step
    for _ in run.epochs(2):
        for x, y in run.batches(loader):
            if engine.micro_steps % 2:
                FAULTS.at("second batch")
            loss = torch.nn.functional.cross_entropy(engine(x.to(KIND)).float(), y)
            engine.backward(loss)
            engine.step()
            FAULTS.at("after" if engine.micro_steps % 2 else "after second batch")
            run.step(loss=loss)
            scale = float(getattr(getattr(engine.optimizer, "loss_scale_config", engine.optimizer), "cur_scale", 0.0))
            seen = [loss.item(), x.sum().item(), schedule.get_last_lr()[0], run.mean_loss, scale, engine.skipped_steps]
            steps[f"{run.global_step}, batch {engine.micro_steps}"] = seen
            if run.global_step % 4 == 0 and engine.micro_steps % 2 == 0:
                with torch.no_grad():
                    found = [engine(x.to(KIND)).float().sum().item() for x, _ in evaluated]
                steps[f"evaluation {run.global_step}"] = found
    return end(engine)


def end(engine: Any) -> dict[str, str]:
    until(lambda: engines_like(engine) == 1)  # what is left of the attempts before goes, if a thread of theirs is slow
    parameters = dict(engine.module.named_parameters())
    state = {name: state_of(engine, each) for name, each in parameters.items()}
    with deepspeed.zero.GatheredParameters(list(parameters.values())) if STAGE == 3 else contextlib.nullcontext():
        found = ending(engine.module, SimpleNamespace(state_dict=lambda: {"state": state}))
    return {**found, "engines": str(engines_like(engine))}


def engines_like(engine: Any) -> int:
    gc.collect()
    return sum(type(each) is type(engine) for each in gc.get_objects())


def state_of(engine: Any, parameter: Any) -> dict[str, Any]:
    """Return the moments and the master copy of a parameter, without what pads a shard."""
    if not engine.save_zero_checkpoint:
        return dict(engine.basic_optimizer.state.get(parameter, {}))
    moments = {name: safe_get_full_optimizer_state(parameter, name) for name in ("exp_avg", "exp_avg_sq")}
    return {"master": safe_get_full_fp32_param(parameter), **moments}


deepspeed_on_cpu()
run_cases(train, json.loads(sys.argv[1]), **SETTINGS["block"])
