"""A small hand-written loop of torch alone, in every variation that the tests need. Started by ``launch.Server``.

Usage: job.py CONFIG.json. It trains in the working directory, writes checkpoints below ``out`` and its trace to
``trace.<rank>``.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import random
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import cycles
from regression import FEATURES, Bare, Mapped, item

from training import (
    CONFIG,
    RANK,
    Ema,
    Growing,
    begin,
    configure,
    digest,
    draws,
    event,
    keep_process_group,
    load_by_hand,
    policy,
    resume_option,
    trace,
)

RANKS = int(os.environ.get("WORLD_SIZE", "1"))

DEFAULTS: dict[str, Any] = {
    "width": 16,
    "samples": 50,
    "batch": 4,
    "epochs": 3,
    "max_steps": None,
    "accumulate": 2,
    "augment": False,
    "workers": 0,
    "batch_norm": False,
    "compile": False,
    "wrap": True,
    "apart": False,
    "ema": False,
    "second": False,
    "evaluate": False,
    "ahead": 0,
    "drawn": False,
    "dropout": 0.2,
    "distributed": RANKS > 1,
    "unpassed": False,
    "renamed": False,
    "stages": False,
    "group": True,
    "scaler": False,
    "zero": False,
    "save_every": 5,
    "load": None,
    "asks": None,
    "options": {},
}


ASKED_AT = 3


def network() -> torch.nn.Module:
    norm = torch.nn.BatchNorm1d(CONFIG["width"]) if CONFIG["batch_norm"] else torch.nn.Identity()
    norm = Growing() if CONFIG["grows"] else norm
    first, last = torch.nn.Linear(FEATURES, CONFIG["width"]), torch.nn.Linear(CONFIG["width"], 1)
    return torch.nn.Sequential(
        first, norm, torch.nn.ReLU(), torch.nn.Dropout(CONFIG["dropout"]), last, torch.nn.Flatten(0)
    )


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def ahead(batches: Iterable[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
    """Take some batches before they are trained on, as a prefetcher does."""
    passing = iter(batches)
    taken = collections.deque(itertools.islice(passing, CONFIG["ahead"]))
    for each in passing:
        taken.append(each)
        yield taken.popleft()
    yield from taken


class Job:
    """Everything the loop uses."""

    def __init__(self) -> None:
        if RANKS > 1 and CONFIG["group"]:
            dist.init_process_group("gloo")
            keep_process_group()
        seed(0)
        if CONFIG["stages"] and RANK:
            CONFIG["width"] *= 2
        self.plain = network()
        self.model: Any = torch.compile(self.plain, backend="eager") if CONFIG["compile"] else self.plain
        if RANKS > 1 and CONFIG["wrap"]:
            buckets = {"bucket_cap_mb": 1} if CONFIG["width"] > 256 else {}
            self.model = DistributedDataParallel(self.model, **buckets)
        self.optimizer = self.new_optimizer()
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, 1e-2, total_steps=200, cycle_momentum=not CONFIG["zero"]
        )
        self.scaler = torch.amp.GradScaler("cpu", enabled=CONFIG["scaler"], init_scale=2.0**127, growth_interval=4)
        self.ema = Ema(self.plain) if CONFIG["ema"] else None
        if CONFIG["second"]:
            self.second = torch.nn.Linear(FEATURES, 1)
            self.second_optimizer = torch.optim.SGD(self.second.parameters(), lr=1e-2, momentum=0.9)
        dataset: Any = Mapped(CONFIG["samples"])
        sampler: Any = torch.utils.data.RandomSampler(dataset)
        if CONFIG["distributed"] and CONFIG["group"]:
            sampler = torch.utils.data.DistributedSampler(dataset, RANKS, RANK)
        self.sampler = sampler
        self.loader: Any = torch.utils.data.DataLoader(
            dataset, CONFIG["batch"], sampler=sampler, num_workers=CONFIG["workers"]
        )
        self.synced = False
        seed(1 + RANK)
        if not CONFIG["cycles"]:
            self.run: Any = Bare(lambda step: self.synced, self.save) if CONFIG["bare"] else self.registered("out")

    def new_optimizer(self) -> Any:
        if CONFIG["zero"]:
            return ZeroRedundancyOptimizer(self.plain.parameters(), torch.optim.AdamW, lr=5e-3)
        return torch.optim.AdamW(self.plain.parameters(), lr=5e-3, weight_decay=0.1)

    def saved(self) -> dict[str, Any]:
        found: dict[str, Any] = {"net" if CONFIG["renamed"] else "model": self.model}
        if CONFIG["second"]:
            found |= {"second": self.second, "second_optimizer": self.second_optimizer}
        found["optimizer"] = self.optimizer
        return found if CONFIG["unpassed"] else {**found, "schedule": self.schedule}

    def save(self, step: int) -> None:
        if RANK == 0:
            file = Path(f"out/step-{step}/training.pt")
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.save({name: getattr(each, "module", each).state_dict() for name, each in self.saved().items()}, file)

    def registered(self, run_directory: str) -> Any:
        from resume_adapters.loop import register_for_resume

        return register_for_resume(
            run_directory,
            save_every=CONFIG["save_every"],
            resume=resume_option(),
            keep=policy(),
            scaler=self.scaler,
            **CONFIG["options"],
            **self.saved(),
            **({"ema": self.ema} if self.ema else {}),
        )

    def train(self) -> None:
        run = self.run
        if CONFIG["drawn"]:
            for _ in run.steps(CONFIG["max_steps"]):
                for micro in range(CONFIG["accumulate"]):
                    self.step(self.drawn(), micro)
                self.count()
                self.evaluate()
            return
        for epoch in run.epochs(CONFIG["epochs"], max_steps=CONFIG["max_steps"]):
            event("epoch_begin", run.global_step)
            begin(self.optimizer)
            if CONFIG["distributed"]:
                self.sampler.set_epoch(epoch)
            for micro, batch in ahead(run.enumerate(self.loader)):
                self.step(batch, micro)
                self.count()
            self.evaluate()
            event("epoch_end", run.global_step)

    def drawn(self) -> dict[str, torch.Tensor]:
        """Return a batch that no loader has."""
        items = [item(int(index)) for index in torch.randint(CONFIG["samples"], (CONFIG["batch"],))]
        return {name: torch.stack([each[name] for each in items]) for name in ("x", "y")}

    def step(self, batch: dict[str, torch.Tensor], micro: int) -> None:
        time.sleep(CONFIG["slow"])
        step, rate = self.run.global_step, self.schedule.get_last_lr()[0]
        self.synced = (micro + 1) % CONFIG["accumulate"] == 0
        alone = RANKS > 1 and CONFIG["wrap"] and (CONFIG["apart"] or not self.synced)
        with self.model.no_sync() if alone else contextlib.nullcontext():
            loss = (self.model(batch["x"]) - batch["y"]).square().mean()
            self.scaler.scale(loss / CONFIG["accumulate"]).backward()
        event("backward", step)
        if CONFIG["second"]:
            other = (self.second(batch["x"] + torch.randn_like(batch["x"])).squeeze(1) - batch["y"]).square().mean()
            other.backward()
        if self.synced:
            if RANKS > 1 and not (CONFIG["wrap"] or CONFIG["apart"]):
                for parameter in self.plain.parameters():
                    dist.all_reduce(parameter.grad)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            if CONFIG["second"]:
                self.second_optimizer.step()
                self.second_optimizer.zero_grad()
            self.schedule.step()
            if self.ema:
                self.ema.update()
        self.loss = loss
        rows = {"rows": [digest(row) for row in batch["x"]], "mean": loss.item()}
        trace(step=step, loss=loss.item().hex(), batch=digest(batch["x"], batch["y"]), lr=float(rate).hex(), **rows)
        event("batch_end", step)

    def count(self) -> None:
        self.run.step(loss=self.loss)
        if self.synced and CONFIG["asks"] == "save" and self.run.global_step == ASKED_AT and RANK == 1:
            self.run.save()
        if self.synced and CONFIG["asks"] == "best" and self.run.global_step == ASKED_AT:
            self.run.best(float("nan") if RANK else 1.0)
        if self.synced:
            event("step_end", self.run.global_step)

    def evaluate(self) -> None:
        if not CONFIG["evaluate"]:
            return
        self.model.eval()
        with torch.no_grad():
            loss = (self.plain(self.drawn()["x"])).square().mean()
        self.model.train()
        trace(evaluation=loss.item().hex(), step=self.run.global_step)

    def finish(self) -> None:
        trace(
            final=True,
            weights=digest(*self.plain.state_dict().values()),
            values=[value for each in self.plain.parameters() for value in each.flatten().tolist()],
            second=digest(*self.second.state_dict().values()) if CONFIG["second"] else None,
            optimizer=digest(*(each["exp_avg_sq"] for each in self.optimizer.state_dict()["state"].values())),
            global_step=self.run.global_step,
            ema=[digest(*self.ema.shadow), self.ema.updates] if self.ema else None,
            scaler=self.scaler.state_dict(),
            schedule=self.schedule.last_epoch,
            draws=draws(),
        )


class Cycles:
    """What one loop trains, and a registration for each run."""

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
        return {
            "hidden": [cycles.hidden(each) for each in (job.loader, job.optimizer, job.scaler)],
            "hooks": cycles.hooks(job.optimizer, module=job.plain),
        }


def main() -> None:
    configure("out", DEFAULTS)
    if CONFIG["cycles"]:
        cycles.train_in_cycles(Cycles())
        return
    job = Job()
    load_by_hand(job.plain, job.optimizer)
    if CONFIG["load"]:
        saved = torch.load(CONFIG["load"], weights_only=True)
        for name, each in job.saved().items():
            getattr(each, "module", each).load_state_dict(saved[name])
    job.train()
    event("train_end", job.run.global_step)
    job.finish()


if __name__ == "__main__":
    main()
