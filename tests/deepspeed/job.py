"""A small DeepSpeed loop, in every variation that the tests need. Started by ``launch.Server``.

Usage: job.py CONFIG.json. It trains in the working directory, writes checkpoints to ``out`` and its trace to
``trace.<rank>``. With ``nodes`` each rank is a node of its own, with a disk of its own: rank one's is in ``node-1``.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker
from deepspeed.runtime.dataloader import RepeatingLoader
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

import cycles
from regression import FEATURES, Bare, Mapped

from launch import end_process
from training import (
    CONFIG,
    RANK,
    Ema,
    augmented_on_device,
    begin,
    configure,
    deepspeed_on_cpu,
    digest,
    draws,
    event,
    located,
    policy,
    trace,
)

OUT = "out"
MOMENTS = ("exp_avg", "exp_avg_sq")


# ---- Model


class Net(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = torch.nn.Linear(FEATURES, width)
        self.norm = torch.nn.BatchNorm1d(width) if CONFIG["batch_norm"] else torch.nn.Identity()
        self.dropout = torch.nn.Dropout(CONFIG["dropout"])
        self.middle = torch.nn.Linear(width, width)
        # Two: on two ranks nothing is padded then, and what DeepSpeed pads with is left to chance.
        self.last = torch.nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(x)))
        x = deepspeed.checkpointing.checkpoint(self.block, x) if CONFIG["recompute"] else self.block(x)
        return self.last(x).sum(-1)

    def block(self, x: torch.Tensor) -> torch.Tensor:
        with get_cuda_rng_tracker().fork() if CONFIG["recompute"] else contextlib.nullcontext():
            x = self.dropout(x)
        return torch.relu(self.middle(x))


class Warmup:
    """A schedule whose state holds an object."""

    def __init__(self) -> None:
        self.parent = type(self)

    def __call__(self, step: int) -> float:
        return 1.0


# ---- The loop


DEFAULTS: dict[str, Any] = {
    "seed": 0,
    "rank_seeds": False,
    "width": 16,
    "samples": 50,
    "batch": 2,
    "epochs": 3,
    "max_steps": None,
    "accumulate": 2,
    "stage": 0,
    "dropout": 0.2,
    "recompute": False,
    "elastic": False,
    "rows": False,
    "workers": 0,
    "precision": "fp32",
    "optimizer": "torch",
    "offload": False,
    "augment": False,
    "batch_norm": False,
    "frozen": False,
    "loader": "user",
    "set_epoch": False,
    "scheduler": "engine",
    "cycle": False,
    "ema": False,
    "native": False,
    "nodes": False,
    "dies_committing": None,
    "scores": None,
    "save_every": 5,
    "options": {},
    "config": {},
}


def ds_config() -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": CONFIG["batch"],
        "gradient_accumulation_steps": CONFIG["accumulate"],
        "gradient_clipping": 1.0,
        "steps_per_print": 10000,
        "zero_optimization": {"stage": CONFIG["stage"]},
    }
    if CONFIG["offload"]:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    if CONFIG["precision"] == "bf16":
        config["bf16"] = {"enabled": True}
    if CONFIG["precision"] == "fp16":  # a scale that overflows and then grows again
        config["fp16"] = {"enabled": True, "initial_scale_power": 18, "loss_scale_window": 4, "hysteresis": 1}
    if CONFIG["optimizer"] == "fused":
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 5e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}}
    if CONFIG["cycle"]:  # moves the momentum too
        config["scheduler"] = {
            "type": "OneCycle",
            "params": {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 6},
        }
    if CONFIG["nodes"]:
        config["checkpoint"] = {"use_node_local_storage": True}
    return {**config, **CONFIG["config"]}


def json_file(config: dict[str, Any]) -> str:
    """Return a file with a configuration: what most scripts have, and what makes lists of tuples."""
    file = Path(f"ds_config.{RANK}.json")
    file.write_text(json.dumps(config))
    return str(file)


class Job:
    """Everything the loop uses."""

    def __init__(self) -> None:
        torch.manual_seed(CONFIG["seed"])
        random.seed(CONFIG["seed"])
        np.random.seed(CONFIG["seed"])
        if CONFIG["device"] == "walled":
            importlib.import_module("device.group")
            importlib.import_module("device.engine")
        model = Net(CONFIG["width"]).to(CONFIG["device"])  # of such a device torch makes new parameters
        model.first.requires_grad_(not CONFIG["frozen"])
        optimizer = self.optimizer(model)
        warmup = Warmup() if CONFIG["scheduler"] == "object" else lambda step: 1 / (1 + 0.1 * step)
        config = ds_config()
        scheduler = None if "scheduler" in config else lambda given: torch.optim.lr_scheduler.LambdaLR(given, warmup)
        data = Mapped(CONFIG["samples"])
        self.engine, _, own_loader, self.scheduler = deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            optimizer=optimizer,
            lr_scheduler=scheduler,
            training_data=data if CONFIG["loader"] == "own" else None,
            config=config if "sequence_parallel_size" in config else json_file(config),
        )
        assert self.engine.device.type == CONFIG["device"], "it trains there"
        if CONFIG["recompute"]:
            deepspeed.checkpointing.configure(None, partition_activations=False, checkpoint_in_cpu=False)
            get_cuda_rng_tracker().add("model-parallel-rng", 7)
        if CONFIG["rank_seeds"]:
            torch.manual_seed(1000 + RANK)
            random.seed(1000 + RANK)
            np.random.seed(1000 + RANK)
        self.loader = own_loader if CONFIG["loader"] == "own" else self.user_loader(data)
        self.ema = Ema(model) if CONFIG["ema"] else None
        if not CONFIG["cycles"]:
            self.run: Any = self.bare() if CONFIG["bare"] else self.hooks(CONFIG["run_directory"])

    def optimizer(self, model: torch.nn.Module) -> Any:
        if CONFIG["optimizer"] == "fused":
            return None
        if CONFIG["optimizer"] == "cpu":
            return deepspeed.ops.adam.DeepSpeedCPUAdam(model.parameters(), lr=5e-3, weight_decay=0.1)
        return torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.1)

    def user_loader(self, data: Mapped) -> Any:
        if CONFIG["elastic"]:
            from resume_adapters.data import ElasticSampler, SeededPerSample

            order = ElasticSampler(data, seed=1, rank=RANK, world_size=self.engine.world_size)
            return torch.utils.data.DataLoader(
                SeededPerSample(data, order), batch_size=CONFIG["batch"], sampler=order, num_workers=CONFIG["workers"]
            )
        sampler = (
            torch.utils.data.DistributedSampler(data, self.engine.world_size, RANK) if CONFIG["set_epoch"] else None
        )
        made = torch.utils.data.DataLoader(data, batch_size=CONFIG["batch"], shuffle=sampler is None, sampler=sampler)
        return RepeatingLoader(made) if CONFIG["loader"] == "repeating" else made

    def bare(self) -> Bare:
        def save(step: int) -> None:
            self.engine.save_checkpoint(CONFIG["run_directory"])

        return Bare(lambda step: self.engine.global_steps != step, save)

    def hooks(self, run_directory: str) -> Any:
        from resume_adapters.deepspeed import ResumeHooks

        return ResumeHooks(
            self.engine,
            run_directory,
            save_every=CONFIG["save_every"],
            resume=CONFIG["resume"],
            keep=policy(),
            **CONFIG["options"],
            **({"ema": self.ema} if self.ema else {}),
        )

    def train(self) -> None:
        run = self.run
        for epoch in run.epochs(CONFIG["epochs"], max_steps=CONFIG["max_steps"]):
            event("epoch_begin", run.global_step)
            begin(self.engine.optimizer, weights=False)  # it steps copies of its own
            if CONFIG["set_epoch"]:
                self.sampler().set_epoch(epoch)
            for batch in run.batches(self.loader):
                self.step(batch)
            event("epoch_end", run.global_step)

    def sampler(self) -> Any:
        return self.loader.data_sampler if CONFIG["loader"] == "own" else self.loader.sampler

    def step(self, batch: dict[str, torch.Tensor]) -> None:
        time.sleep(CONFIG["slow"])
        engine, run = self.engine, self.run
        step, rate = run.global_step, float(engine.get_lr()[0])
        kind = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[CONFIG["precision"]]
        x, y = (batch[name].to(engine.device) for name in ("x", "y"))
        loss = (engine(augmented_on_device(x).to(kind)).float() - y).square().mean()
        engine.backward(loss)
        event("backward", step)
        engine.step()
        if self.ema and engine.micro_steps % CONFIG["accumulate"] == 0:
            self.ema.update()
        scaler = getattr(engine.optimizer, "loss_scale_config", engine.optimizer)
        scale = float(getattr(scaler, "cur_scale", 0.0))
        rows = {"rows": [digest(row) for row in batch["x"]], "mean": loss.item()} if CONFIG["rows"] else {}
        line = {"step": step, "loss": loss.item().hex(), "batch": digest(batch["x"], batch["y"]), "lr": rate.hex()}
        trace(**line, scale=scale, **rows)
        event("batch_end", step)
        run.step(loss=loss)
        if run.global_step != step:
            if CONFIG["scores"] and not CONFIG["bare"]:
                run.best(CONFIG["scores"].get(str(run.global_step), 99.0), name="score")
            event("step_end", run.global_step)

    def finish(self) -> None:
        engine = self.engine
        tensors = engine.module_state_dict() if CONFIG["stage"] < 3 else self.gathered()
        trace(
            final=True,
            weights=digest(*tensors.values()),
            sums={name: each.double().sum().item() for name, each in tensors.items()} if CONFIG["rows"] else None,
            optimizer=digest(*self.moments()),
            global_steps=engine.global_steps,
            skipped_steps=engine.skipped_steps,
            ema=[digest(*self.ema.shadow), self.ema.updates] if self.ema else None,
            draws=draws(),
            tracked=[digest(each) for each in get_cuda_rng_tracker().get_states().values()],
        )

    def gathered(self) -> dict[str, torch.Tensor]:
        with deepspeed.zero.GatheredParameters(list(self.engine.module.parameters())):
            return {name: each.detach().clone() for name, each in self.engine.module.named_parameters()}

    def moments(self) -> list[torch.Tensor]:
        """Return the moments and the master weights; at stage 3 without the padding, which nothing initialises."""
        if CONFIG["stage"] < 3:
            return optimizer_tensors(self.engine.optimizer.state_dict())
        full = [
            [safe_get_full_fp32_param(each), *(safe_get_full_optimizer_state(each, name) for name in MOMENTS)]
            for each in self.engine.module.parameters()
            if each.requires_grad
        ]
        return [tensor for tensors in full for tensor in tensors]


def optimizer_tensors(state: Any) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    if isinstance(state, dict):
        return [each for value in state.values() for each in optimizer_tensors(value)]
    if isinstance(state, list | tuple):
        return [each for value in state for each in optimizer_tensors(value)]
    return []


def on_a_node_of_its_own() -> None:
    """Let this rank be a node. Rank one may be killed where rank zero has committed a checkpoint, and it has not."""
    os.environ["LOCAL_RANK"] = "0"
    CONFIG["run_directory"] = OUT if RANK == 0 else f"node-{RANK}/{OUT}"
    marker = f"{OUT}/{CONFIG['dies_committing']}/resume/manifest.json"

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.rename" and located(arguments[1], arguments[3]).endswith(f"node-1/{marker}"):
            while not Path(marker).exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(audit)


class Cycles:
    """One engine for all runs, and hooks for each."""

    event = "step_end"

    def __init__(self) -> None:
        self.job = Job()
        self.directory = ""

    def prepare(self, cycle: cycles.Cycle, run_directory: str) -> None:
        CONFIG["max_steps"], self.directory = cycle.steps, run_directory
        engine = self.job.engine
        engine.global_steps = engine.micro_steps = engine.global_samples = 0

    def train(self) -> None:
        self.job.run = self.job.hooks(self.directory)
        with self.job.run:
            self.job.train()

    def outline(self) -> dict[str, Any]:
        engine, loader = self.job.engine, self.job.loader
        return {
            "hidden": [cycles.hidden(each) for each in (engine, engine.optimizer, engine.basic_optimizer, loader)],
            "checkpoint_engine": type(engine.checkpoint_engine).__name__,
            "hooks": cycles.hooks(engine.basic_optimizer, module=engine.module),
        }


def main() -> None:
    configure(OUT, DEFAULTS)
    if CONFIG["nodes"]:
        on_a_node_of_its_own()
    deepspeed_on_cpu()
    if CONFIG["cycles"]:
        cycles.train_in_cycles(Cycles())
        return
    job = Job()
    if CONFIG["native"]:
        found, _ = job.engine.load_checkpoint(CONFIG["run_directory"])
        trace(loaded=str(found), step=job.engine.global_steps)
        return
    job.train()
    job.finish()
    end_process(0)


if __name__ == "__main__":
    main()
