"""A small hand-written Accelerate loop, in every variation that the tests need. Started by ``launch.Server``.

Usage: job.py CONFIG.json. It trains in the working directory, writes checkpoints below ``project`` and its trace to
``trace.<rank>``.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import random
import time
from typing import Any

import numpy as np
import torch
from accelerate import (
    Accelerator,
    DataLoaderConfiguration,
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
)
from accelerate.data_loader import DataLoaderAdapter
from accelerate.local_sgd import LocalSGD
from accelerate.utils import (
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
    ProjectConfiguration,
    set_seed,
)

import cycles
from regression import FEATURES, Bare, Mapped, item

from training import (
    CONFIG,
    Ema,
    accelerate_shards_on_cpu,
    augmented_on_device,
    begin,
    configure,
    deepspeed_on_cpu,
    digest,
    draws,
    dump_loaded,
    engine_facts,
    event,
    generator,
    keep_process_group,
    load_by_hand,
    noise,
    policy,
    resume_option,
    trace,
    whole_weights,
)

# ---- Data


_GENERATOR = torch.Generator().manual_seed(5)
_COUNT = itertools.count()


class Noisy(Mapped):
    """Adds numbers from a generator of its own, or from a global one or a count."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.generator = generator() if CONFIG["own_generator"] is True else None

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        found = super().__getitem__(index)
        is_counted = CONFIG["own_generator"] == "count"
        found["x"] = found["x"] + (next(_COUNT) % 7 if is_counted else noise(1, self.generator or _GENERATOR))
        return found


def mapped(size: int) -> Mapped:
    return Noisy(size) if CONFIG["own_generator"] else Mapped(size)


class Stream(torch.utils.data.IterableDataset):
    """A stream without a length, reshuffled in each pass."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        order = list(range(self.size))
        random.Random(self.epoch).shuffle(order)
        worker = torch.utils.data.get_worker_info()
        for index in order if worker is None else order[worker.id :: worker.num_workers]:
            yield item(index)


def data_loader(size: int, *, shuffle: bool = True) -> torch.utils.data.DataLoader:
    workers = {"num_workers": CONFIG["workers"], "persistent_workers": CONFIG["persistent"]}
    if CONFIG["stream"] and shuffle:
        return torch.utils.data.DataLoader(Stream(size), batch_size=4, **workers)
    if CONFIG["elastic"] and shuffle:
        from resume_adapters.data import ElasticSampler, SeededPerSample

        sampler = ElasticSampler(size, seed=1)
        seeded = SeededPerSample(mapped(size), sampler)
        return torch.utils.data.DataLoader(seeded, batch_size=CONFIG["batch"], sampler=sampler, **workers)
    dropping = CONFIG["drop_last"]
    return torch.utils.data.DataLoader(
        mapped(size), batch_size=CONFIG["batch"], shuffle=shuffle, drop_last=dropping, **workers
    )


# ---- Model


class Net(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = torch.nn.Linear(FEATURES, width)
        self.norm = torch.nn.BatchNorm1d(width) if CONFIG["batch_norm"] else torch.nn.Identity()
        self.dropout = torch.nn.Dropout(CONFIG["dropout"])
        self.middle = torch.nn.Linear(width, width)
        self.last = torch.nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.last.weight.dtype)
        x = self.dropout(torch.relu(self.norm(self.first(x))))
        return self.last(torch.relu(self.middle(x))).squeeze(-1)


class Counter:
    """What a script gives to ``register_for_checkpointing``."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class OtherCounter(Counter):
    pass


def network() -> torch.nn.Module:
    made: Any = Net(CONFIG["width"])
    if CONFIG["lora"]:
        from peft import LoraConfig, get_peft_model

        made = get_peft_model(made, LoraConfig(r=4, lora_dropout=0.1, target_modules=["first", "last"]))
    if CONFIG["compile"]:
        made = torch.compile(made, backend="eager")
        if not CONFIG["traced"]:
            torch.compiler.set_stance("force_eager")
    return made


def bare(accelerator: Accelerator) -> Bare:
    automatic = accelerator.project_configuration.automatic_checkpoint_naming

    def save(step: int) -> None:
        accelerator.save_state(None if automatic else f"project/checkpoints/checkpoint_{step}")

    return Bare(lambda step: accelerator.sync_gradients, save)


DEFAULTS: dict[str, Any] = {
    "seed": 0,
    "width": 16,
    "samples": 50,
    "batch": 4,
    "epochs": 3,
    "max_steps": None,
    "accumulate": 2,
    "accumulate_later": None,
    "by_hand": False,
    "stream": False,
    "augment": False,
    "elastic": False,
    "rows": False,
    "total": None,
    "dropout": 0.2,
    "own_generator": False,
    "register_generator": False,
    "drop_last": False,
    "workers": 0,
    "persistent": False,
    "set_epoch": False,
    "loader": {},
    "rank_seeds": False,
    "local_sgd": False,
    "precision": "no",
    "half": False,
    "scaler": False,
    "lora": False,
    "compile": False,
    "traced": True,
    "batch_norm": False,
    "ddp": {},
    "clip": False,
    "ema": False,
    "second": False,
    "evaluate": False,
    "registered": None,
    "prepared": True,
    "unregistered": False,
    "naming": False,
    "limit": None,
    "with": False,
    "scores": None,
    "save_every": 5,
    "fsdp": None,
    "fsdp_version": 2,
    "dump": False,
    "parallel": {},
    "zero": None,
    "engine": {},
    "optimizer": "AdamW",
    "frozen": False,
    "asks_at": None,
    "own_saves": (),
    "left_at": None,
    "load": None,
    "wrapped": True,
    "trackers": [],
    "options": {},
}


def new_accelerator() -> Accelerator:
    """Make the accelerator, on the CPU; the strategies that it is not made for there need to be led to it."""
    placement: dict[str, Any] = {"cpu": CONFIG["device"] == "cpu"}
    handlers: list[Any] = [DistributedDataParallelKwargs(**CONFIG["ddp"])]
    if CONFIG["fsdp"]:
        accelerate_shards_on_cpu()
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=CONFIG["fsdp_version"],
            state_dict_type=CONFIG["fsdp"],
            auto_wrap_policy="NO_WRAP",
            reshard_after_forward=True if CONFIG["fsdp_version"] == 2 else "FULL_SHARD",
        )
        placement = {"fsdp_plugin": plugin}
    if CONFIG["zero"] is not None:
        deepspeed_on_cpu()
        settings = {
            "train_micro_batch_size_per_gpu": CONFIG["batch"],
            "gradient_accumulation_steps": CONFIG["accumulate"],
            "zero_optimization": {"stage": CONFIG["zero"]},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            **CONFIG["engine"],
        }
        placement = {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=settings)}
        handlers = [InitProcessGroupKwargs(backend="gloo")]
    return Accelerator(
        **placement,
        gradient_accumulation_steps=1 if CONFIG["by_hand"] else CONFIG["accumulate"],
        mixed_precision=CONFIG["precision"],
        dataloader_config=DataLoaderConfiguration(**CONFIG["loader"]),
        project_config=ProjectConfiguration(
            "project", automatic_checkpoint_naming=CONFIG["naming"], total_limit=CONFIG["limit"]
        ),
        kwargs_handlers=handlers,
        log_with=CONFIG["trackers"],
    )


class Job:
    """Everything the loop uses."""

    def __init__(self) -> None:
        if not CONFIG["bare"]:
            importlib.import_module("resume_adapters.accelerate")  # at the beginning, as a script has it
        self.accelerator = accelerator = new_accelerator()
        if CONFIG["scaler"]:  # Accelerate makes one only where there is an accelerator; this one overflows
            accelerator.scaler = torch.amp.GradScaler(CONFIG["device"], init_scale=2.0**127, growth_interval=4)
        set_seed(CONFIG["seed"])
        self.plain = network().to(CONFIG["device"], torch.bfloat16 if CONFIG["half"] else None)
        if CONFIG["fsdp_version"] == 1:  # flattened before the optimizer is made of its parameters
            self.plain = accelerator.prepare(self.plain)
        self.ema = Ema(self.plain) if CONFIG["ema"] else None
        kind, _, momentum = CONFIG["optimizer"].partition(" ")  # without a momentum it has no state
        made = {"momentum": 0.9} if kind == "SGD" and not momentum else {}
        optimizer = getattr(torch.optim, kind)(self.plain.parameters(), 5e-3, weight_decay=0.1, **made)
        total = CONFIG["total"] or 60 * accelerator.num_processes
        schedule: Any = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=total)
        if (
            CONFIG["elastic"] or CONFIG["rows"]
        ):  # a rate that depends on the fraction of the run alone, and is one of numpy's numbers
            schedule = torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda step: np.float64(0.1 + (1 - step / total) ** 2)
            )
        if CONFIG["rank_seeds"]:
            set_seed(CONFIG["seed"], device_specific=True)
        self.given = data_loader(CONFIG["samples"])
        self.model, self.optimizer, self.loader, self.scheduler = accelerator.prepare(
            self.plain, optimizer, self.given, schedule
        )
        self.unknown = torch.optim.lr_scheduler.MultiStepLR(optimizer, [4, 9, 14]) if CONFIG["unregistered"] else None
        self.evaluation = accelerator.prepare(data_loader(12, shuffle=False)) if CONFIG["evaluate"] else None
        if CONFIG["second"]:
            self.other = Net(4).to(CONFIG["device"])
            self.second, self.second_optimizer = accelerator.prepare(
                self.other, torch.optim.SGD(self.other.parameters(), lr=1e-2, momentum=0.9)
            )
        self.local: Any = None
        self.counters = [Counter(), OtherCounter()]
        for index in CONFIG["registered"] or []:
            accelerator.register_for_checkpointing(self.counters[index])
        if not CONFIG["cycles"]:
            self.run: Any = bare(accelerator) if CONFIG["bare"] else self.registered()

    def registered(self, run_directory: str | None = None) -> Any:
        from resume_adapters.accelerate import register_for_resume

        parts = {"ema": self.ema} if self.ema else {}
        if CONFIG["register_generator"]:
            parts["generator"] = self.given.dataset.generator
        return register_for_resume(
            self.accelerator,
            run_dir=run_directory,
            save_every=CONFIG["save_every"],
            resume=resume_option(),
            keep=policy(),
            **CONFIG["options"],
            **parts,
        )

    def train_unwrapped(self) -> None:
        start = self.run.resume(self.loader)
        for _ in range(start.epoch, CONFIG["epochs"]):
            for micro, batch in enumerate(self.loader):
                self.step(batch, micro)
            self.evaluate()
        self.run.finish()

    def train(self) -> None:
        run = self.run
        if CONFIG["trackers"]:
            run.resume()
            self.accelerator.init_trackers("tests", config={"seed": CONFIG["seed"]})
        for epoch in run.epochs(CONFIG["epochs"], max_steps=CONFIG["max_steps"]):
            if CONFIG["dump"]:
                dump_loaded(self.model, self.optimizer.optimizer)
            event("epoch_begin", run.global_step)
            begin(self.optimizer)
            if CONFIG["set_epoch"]:
                self.loader.set_epoch(epoch)
            for micro, batch in run.enumerate(self.loader):
                self.step(batch, micro)
                if run.global_step == CONFIG["left_at"]:
                    return
            self.evaluate()
            event("epoch_end", run.global_step)

    def step(self, batch: dict[str, torch.Tensor], micro: int) -> None:
        time.sleep(CONFIG["slow"])
        accelerator, run = self.accelerator, self.run
        if CONFIG["local_sgd"] and self.local is None:
            self.local = LocalSGD(accelerator, self.model, local_sgd_steps=3).__enter__()
        step, rate = run.global_step, self.scheduler.get_last_lr()[0]
        if CONFIG["by_hand"]:
            loss, synced = self.by_hand(batch, micro)
        else:
            with accelerator.accumulate(self.model):
                loss = self.losses(batch)
                accelerator.backward(loss)
                event("backward", step)
                if CONFIG["clip"] and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
                if CONFIG["second"]:
                    self.second_optimizer.step()
                    self.second_optimizer.zero_grad()
            synced = accelerator.sync_gradients
        if synced:
            if self.local is not None:
                self.local.step()
            if step + 1 == 6 and CONFIG["accumulate_later"]:
                accelerator.gradient_accumulation_steps = CONFIG["accumulate_later"]
            if self.unknown is not None:
                self.unknown.step()
            if self.ema:
                self.ema.update()
            for index, counter in enumerate(self.counters):
                counter.count += index + 1
        of_rows = {"rows": [digest(row) for row in batch["x"]], "mean": loss.item()}
        rows = of_rows if CONFIG["elastic"] or CONFIG["rows"] else {}
        trace(step=step, loss=loss.item().hex(), batch=digest(batch["x"], batch["y"]), lr=float(rate).hex(), **rows)
        event("batch_end", step)
        if CONFIG["trackers"] and synced:
            self.accelerator.log({"loss": loss.item()}, step=step)
        run.step(loss=loss)
        if step == CONFIG["asks_at"] and not synced:
            run.save()
        if synced:
            if run.global_step in CONFIG["own_saves"]:
                self.accelerator.save_state()
            event("step_end", run.global_step)

    def losses(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        x = augmented_on_device(batch["x"])
        x = x if CONFIG["zero"] is None else x.to(self.plain.last.weight.dtype)  # the engine has converted the model
        loss = (self.model(x) - batch["y"]).square().mean()
        if CONFIG["second"]:
            loss = loss + (self.second(batch["x"] + torch.randn_like(batch["x"])) - batch["y"]).square().mean()
        return loss

    def by_hand(self, batch: dict[str, torch.Tensor], micro: int) -> tuple[torch.Tensor, bool]:
        loss = self.losses(batch) / CONFIG["accumulate"]
        self.accelerator.backward(loss)
        synced = (micro + 1) % CONFIG["accumulate"] == 0
        if synced:
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        return loss, synced

    def evaluate(self) -> None:
        if self.evaluation is None:
            return
        self.model.eval()
        with torch.no_grad():
            losses = [(self.model(batch["x"]) - batch["y"]).square().mean() for batch in self.evaluation]
        self.model.train()
        self.run.memory["evaluated"] = torch.stack(losses).mean().item().hex()
        if CONFIG["scores"] is not None:
            self.run.best(CONFIG["scores"].get(str(self.run.global_step), 99.0), name="score")

    def finish(self) -> None:
        run, scaler = self.run, self.accelerator.scaler
        saved = whole_weights(self.plain) if CONFIG["zero"] == 3 else self.plain.state_dict().values()
        weights = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in saved]
        trace(
            final=True,
            evaluated=self.run.memory.get("evaluated"),
            strategy=str(self.accelerator.distributed_type),
            engine=engine_facts(self.model) if CONFIG["zero"] is not None else None,
            weights=digest(*weights),
            values=[value for each in weights for value in each.flatten().tolist()]
            if CONFIG["elastic"] or CONFIG["rows"]
            else None,
            second=digest(*self.other.state_dict().values()) if CONFIG["second"] else None,
            global_step=run.global_step,
            accelerator_step=self.accelerator.step,
            ema=[digest(*self.ema.shadow), self.ema.updates] if self.ema else None,
            counters=[counter.count for counter in self.counters] if CONFIG["registered"] else None,
            scaler=scaler.state_dict() if scaler else None,
            scheduler=self.scheduler.scheduler.last_epoch,
            draws=draws(),
        )


class Cycles:
    """One accelerator and what it prepared, and a registration for each run."""

    event = "step_end"

    def __init__(self) -> None:
        self.job = Job()
        self.directory = ""

    def prepare(self, cycle: cycles.Cycle, run_directory: str) -> None:
        CONFIG["max_steps"], self.directory = cycle.steps, run_directory
        self.job.accelerator.step = 0
        self.job.loader.iteration = 0

    def train(self) -> None:
        accelerator = self.job.accelerator
        accelerator.project_configuration.logging_dir = self.directory
        try:
            self.job.run = self.job.registered(self.directory)
            with self.job.run:
                self.job.train()
        finally:
            for each in getattr(accelerator, "trackers", ()):
                each.finish()
            accelerator.trackers = []  # else each run would log to those of all before it, too

    def outline(self) -> dict[str, Any]:
        job, loader = self.job, self.job.loader
        inner = job.optimizer.optimizer
        patched = (job.accelerator, job.accelerator.project_configuration, loader, inner)
        return {
            "hidden": [cycles.hidden(each) for each in patched],
            "slice_fn": type(getattr(loader, "slice_fn", None)).__name__,
            "wrapped": cycles.depth(DataLoaderAdapter.__init__),
            "hooks": cycles.hooks(inner, module=job.plain),
        }


def main() -> None:
    configure("project/checkpoints", DEFAULTS)
    if CONFIG["cycles"]:
        cycles.train_in_cycles(Cycles())
        return
    job = Job()
    load_by_hand(job.plain, job.optimizer)
    if CONFIG["frozen"]:
        gc.freeze()
    if CONFIG["load"]:
        job.accelerator.load_state(CONFIG["load"])
    if CONFIG["with"]:
        with job.run:
            job.train()
    elif CONFIG["wrapped"]:
        job.train()
    else:
        job.train_unwrapped()
    event("train_end", job.run.global_step)
    job.finish()
    keep_process_group()
    job.accelerator.end_training()  # which ends the process group too, and what is spread could not be put together


if __name__ == "__main__":
    main()
