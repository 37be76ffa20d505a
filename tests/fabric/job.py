"""A small hand-written loop with Fabric, in every variation that the tests need. Started by ``launch.Server``.

Usage: job.py CONFIG.json. It trains in the working directory, writes checkpoints below ``out`` and its trace to
``trace.<rank>``.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.accelerators import Accelerator
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import cycles
from regression import FEATURES, Bare, Mapped

from training import (
    CONFIG,
    Ema,
    augmented_on_device,
    begin,
    configure,
    digest,
    draws,
    event,
    load_by_hand,
    policy,
    resume_option,
    trace,
)


def network() -> torch.nn.Module:
    norm = torch.nn.BatchNorm1d(CONFIG["width"]) if CONFIG["batch_norm"] else torch.nn.Identity()
    first, last = torch.nn.Linear(FEATURES, CONFIG["width"]), torch.nn.Linear(CONFIG["width"], 1)
    made: Any = torch.nn.Sequential(
        first, norm, torch.nn.ReLU(), torch.nn.Dropout(CONFIG["dropout"]), last, torch.nn.Flatten(0)
    )
    return torch.compile(made, backend="eager") if CONFIG["compile"] else made


DEFAULTS: dict[str, Any] = {
    "seed": 0,
    "width": 16,
    "samples": 50,
    "batch": 4,
    "epochs": 3,
    "max_steps": None,
    "accumulate": 2,
    "augment": False,
    "workers": 0,
    "shuffle": True,
    "batch_norm": False,
    "dropout": 0.2,
    "own_buffers": False,
    "compile": False,
    "apart": False,
    "ema": False,
    "second": False,
    "evaluate": False,
    "anew": False,
    "unpassed": False,
    "limit": None,
    "scaler": False,
    "save_every": 5,
    "load": None,
    "wrapped": True,
    "own_strategy": False,
    "shards": None,
    "tensor": 1,
    "replicas": 1,
    "dimension": None,
    "called": "model",
    "stateless": False,
    "options": {},
}


def spread(model: torch.nn.Module, mesh: Any) -> torch.nn.Module:
    """Shard a model over its data ranks, over some of them where there are replicas, and its layers over the others."""
    if CONFIG["tensor"] > 1:
        parallelize_module(model, mesh["tensor_parallel"], {"0": ColwiseParallel(output_layouts=Replicate())})
    over, replicas = mesh["data_parallel"], CONFIG["replicas"]
    if replicas > 1:
        over = init_device_mesh("cpu", (replicas, over.size() // replicas), mesh_dim_names=("dp_replicate", "dp_shard"))
    if CONFIG["dimension"]:
        over = init_device_mesh("cpu", (over.size(),), mesh_dim_names=(CONFIG["dimension"],))
    if CONFIG["shards"] != "none":
        for part in (*list(model)[:1], model):
            fully_shard(part, mesh=over)
    return model


class Stateless(torch.optim.Optimizer):
    """An optimizer that remembers nothing."""

    def __init__(self, parameters: Any, lr: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.999), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.sub_(each.grad + group["weight_decay"] * each, alpha=group["lr"])


class Elsewhere(SingleDeviceStrategy):
    """A strategy that nobody knows."""


def new_fabric() -> Fabric:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    strategy: Any = Elsewhere(torch.device("cpu")) if CONFIG["own_strategy"] else "auto"
    if ranks > 1:
        buckets = {"bucket_cap_mb": 1} if CONFIG["width"] > 256 else {}
        strategy = DDPStrategy(process_group_backend="gloo", broadcast_buffers=not CONFIG["own_buffers"], **buckets)
    if CONFIG["shards"]:
        tensor = CONFIG["tensor"]
        strategy = ModelParallelStrategy(spread, ranks // tensor, tensor, CONFIG["shards"] == "sharded", "gloo")
    accelerator: Any = CONFIG["device"]
    if accelerator == "walled":
        from device.walled import lightning_accelerator, lightning_ddp

        accelerator = lightning_accelerator(Accelerator)
        alone = SingleDeviceStrategy(torch.device(CONFIG["device"], 0))
        strategy = lightning_ddp(DDPStrategy, ranks) if ranks > 1 else alone
    nodes = 2 if CONFIG["own_disk"] else 1
    fabric = Fabric(
        accelerator=accelerator, devices=ranks // nodes, num_nodes=nodes, strategy=strategy, precision="32-true"
    )
    fabric.launch()
    if CONFIG["scaler"]:  # Fabric makes one only where there is an accelerator; this one overflows
        from lightning.fabric.plugins.precision import MixedPrecision

        scaler = torch.amp.GradScaler(CONFIG["device"], init_scale=2.0**127, growth_interval=4)
        precision = MixedPrecision("16-mixed", CONFIG["device"], scaler)
        precision._desired_input_dtype = torch.float32
        precision.forward_context = torch.enable_grad
        fabric._strategy._precision = fabric._precision = precision
    return fabric


class Job:
    """Everything the loop uses."""

    def __init__(self) -> None:
        self.fabric = new_fabric()
        self.fabric.seed_everything(CONFIG["seed"], workers=False, verbose=False)
        self.plain = network().to(self.fabric.device)  # of such a device torch makes new parameters
        self.ema = Ema(self.plain) if CONFIG["ema"] else None
        self.model = self.fabric.setup_module(self.plain)
        made = Stateless if CONFIG["stateless"] else torch.optim.AdamW
        optimizer = made(self.plain.parameters(), lr=5e-3, weight_decay=0.1)
        self.optimizer = self.fabric.setup_optimizers(optimizer)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=200)
        if CONFIG["second"]:
            self.other = torch.nn.Sequential(torch.nn.Linear(FEATURES, 1)).to(self.fabric.device)
            self.second = self.fabric.setup_module(self.other)
            optimizer = torch.optim.SGD(self.other.parameters(), lr=1e-2, momentum=0.9)
            self.second_optimizer = self.fabric.setup_optimizers(optimizer)
        self.loader = self.new_loader()
        self.synced = False
        if not CONFIG["cycles"]:
            self.run: Any = Bare(lambda step: self.synced, self.save) if CONFIG["bare"] else self.registered("out")

    def new_loader(self) -> Any:
        options = {"num_workers": CONFIG["workers"], "shuffle": CONFIG["shuffle"]}
        return self.fabric.setup_dataloaders(
            torch.utils.data.DataLoader(Mapped(CONFIG["samples"]), CONFIG["batch"], **options)
        )

    def saved(self) -> dict[str, Any]:
        found = {CONFIG["called"]: self.model, "optimizer": self.optimizer}
        if CONFIG["second"]:
            found |= {"second": self.second, "second_optimizer": self.second_optimizer}
        return found if CONFIG["unpassed"] else {**found, "schedule": self.schedule}

    def save(self, step: int) -> None:
        os.makedirs(f"out/step-{step}", exist_ok=True)  # Fabric's writer of one file makes none
        self.fabric.save(f"out/step-{step}/fabric.ckpt", self.saved())

    def registered(self, run_directory: str) -> Any:
        from resume_adapters.fabric import register_for_resume

        return register_for_resume(
            self.fabric,
            run_directory,
            save_every=CONFIG["save_every"],
            resume=resume_option(),
            keep=policy(),
            **CONFIG["options"],
            **self.saved(),
            **({"ema": self.ema} if self.ema else {}),
        )

    def train(self) -> None:
        run = self.run
        for _ in run.epochs(CONFIG["epochs"], max_steps=CONFIG["max_steps"]):
            event("epoch_begin", run.global_step)
            begin(self.optimizer)
            loader = self.new_loader() if CONFIG["anew"] else self.loader
            batches = run.enumerate(loader) if CONFIG["limit"] is None else run.enumerate(loader, limit=CONFIG["limit"])
            for micro, batch in batches:
                self.step(batch, micro)
            self.evaluate()
            event("epoch_end", run.global_step)

    def train_unwrapped(self) -> None:
        start = self.run.resume(self.loader)
        for epoch in range(start.epoch, CONFIG["epochs"]):
            done = start.batches if epoch == start.epoch else 0
            for micro, batch in enumerate(self.loader, done):
                self.step(batch, micro)
        self.run.finish()

    def step(self, batch: dict[str, torch.Tensor], micro: int) -> None:
        time.sleep(CONFIG["slow"])
        run, fabric = self.run, self.fabric
        step, rate = run.global_step, self.schedule.get_last_lr()[0]
        self.synced = (micro + 1) % CONFIG["accumulate"] == 0
        apart = CONFIG["apart"]
        with fabric.no_backward_sync(self.model, enabled=apart or not self.synced):
            loss = (self.model(augmented_on_device(batch["x"])) - batch["y"]).square().mean()
            fabric.backward(loss / CONFIG["accumulate"])
        event("backward", step)
        if CONFIG["second"]:
            other = (self.second(batch["x"] + torch.randn_like(batch["x"])).squeeze(1) - batch["y"]).square().mean()
            fabric.backward(other)
        if self.synced:
            self.optimizer.step()
            self.optimizer.zero_grad()
            if CONFIG["second"]:
                self.second_optimizer.step()
                self.second_optimizer.zero_grad()
            self.schedule.step()
            if self.ema:
                self.ema.update()
        rows = {"rows": [digest(row) for row in batch["x"]], "mean": loss.item()}
        trace(step=step, loss=loss.item().hex(), batch=digest(batch["x"], batch["y"]), lr=float(rate).hex(), **rows)
        event("batch_end", step)
        run.step(loss=loss)
        if self.synced:
            event("step_end", run.global_step)

    def evaluate(self) -> None:
        if not CONFIG["evaluate"]:
            return
        self.model.eval()
        with torch.no_grad():  # over the data of the training: Fabric counts this pass, too
            losses = [(self.model(batch["x"]) - batch["y"]).square().mean() for batch in self.loader]
        self.model.train()
        trace(evaluation=torch.stack(losses).mean().item().hex(), step=self.run.global_step)

    def finish(self) -> None:
        scaler = getattr(self.fabric.strategy.precision, "scaler", None)
        trace(
            final=True,
            weights=digest(*map(whole, self.plain.state_dict().values())),
            values=[value for each in self.plain.parameters() for value in whole(each).flatten().tolist()],
            share=share(self.plain),
            second=digest(*self.other.state_dict().values()) if CONFIG["second"] else None,
            optimizer=digest(
                *(whole(each["exp_avg_sq"]) for each in self.optimizer.state.values() if "exp_avg_sq" in each)
            ),
            global_step=self.run.global_step,
            ema=[digest(*self.ema.shadow), self.ema.updates] if self.ema else None,
            scaler=scaler.state_dict() if scaler else None,
            schedule=self.schedule.last_epoch,
            draws=draws(),
        )


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, gathered from its shards if it has any."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def share(model: torch.nn.Module) -> float:
    """Return how much of the weights this rank holds."""
    held = [each.to_local() if isinstance(each, DTensor) else each for each in model.parameters()]
    return sum(each.numel() for each in held) / sum(each.numel() for each in model.parameters())


class Cycles:
    """One Fabric and what it has set up, and a registration for each run."""

    event = "step_end"

    def __init__(self) -> None:
        self.job = Job()
        self.directory = ""

    def prepare(self, cycle: cycles.Cycle, run_directory: str) -> None:
        CONFIG["max_steps"], self.directory = cycle.steps, run_directory

    def train(self) -> None:
        self.job.run = self.job.registered(self.directory)
        with self.job.run:
            self.job.train()

    def outline(self) -> dict[str, Any]:
        job = self.job
        inner = job.optimizer.optimizer
        return {
            "hidden": [cycles.hidden(each) for each in (job.fabric, job.loader, inner)],
            "hooks": cycles.hooks(inner, module=job.plain),
        }


def main() -> None:
    configure("out", DEFAULTS)
    if CONFIG["cycles"]:
        cycles.train_in_cycles(Cycles())
        return
    job = Job()
    load_by_hand(job.plain, job.optimizer)
    if CONFIG["load"]:
        job.fabric.load(CONFIG["load"], job.saved())
    if CONFIG["wrapped"]:
        job.train()
    else:
        job.train_unwrapped()
    event("train_end", job.run.global_step)
    job.finish()


if __name__ == "__main__":
    main()
