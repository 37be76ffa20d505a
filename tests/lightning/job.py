"""A small training job with Lightning, in every variation that the tests need. Started by ``launch.Server``.

Usage: job.py CONFIG.json. It trains in the working directory, writes checkpoints to ``out`` and its trace to
``trace.<rank>``.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import CombinedLoader
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import cycles

from training import (
    CONFIG,
    RANK,
    Ema,
    Growing,
    augmented_on_device,
    begin,
    configure,
    digest,
    draws,
    dump_loaded,
    engine_facts,
    event,
    generator,
    lightning_deepspeed_on_cpu,
    load_by_hand,
    noise,
    policy,
    resume_option,
    trace,
    whole_weights,
)

WIDTH = 8

# ---- Data


def item(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
    if CONFIG["augment"]:
        x = x + torch.rand(WIDTH) + random.random() + float(np.random.random())
    return x, x.sum().view(1)


class Mapped(Dataset):
    def __init__(self, size: int) -> None:
        self.size = size
        self.generator = generator() if CONFIG["own_generator"] else None

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = item(index)
        return (x + noise(1, self.generator), y) if self.generator is not None else (x, y)


class Stream(IterableDataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Any:
        worker = torch.utils.data.get_worker_info()
        start, step = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        for index in range(start, self.size, step):
            yield item(index)


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.size


def elastic(size: int) -> Any:
    """Return a loader of ``resume_adapters.data``: map-style with augmentation by sample, or shards."""
    from resume_adapters.data import ElasticSampler, ElasticShards, SeededPerSample

    place = {"seed": 1, "rank": RANK, "world_size": int(os.environ.get("WORLD_SIZE", "1"))}
    options = {"batch_size": CONFIG["batch"], "num_workers": CONFIG["workers"]}
    if CONFIG["data"] == "map":
        sampler = ElasticSampler(size, **place)
        return DataLoader(SeededPerSample(Mapped(size), sampler), sampler=sampler, **options)
    shards = ElasticShards(range(size // 8), lambda shard: map(item, range(8 * shard, 8 * shard + 8)), **place)
    return DataLoader(shards, **options)


def training_data() -> Any:
    if CONFIG["elastic"]:
        return elastic(CONFIG["samples"])
    if not CONFIG["combined"]:
        return loader(CONFIG["data"], CONFIG["samples"])
    pair = {"long": loader(CONFIG["data"], CONFIG["samples"]), "short": loader("map", 36)}
    return CombinedLoader(pair, CONFIG["combined"])


def validation_data() -> Any:
    """Return the validation's loaders, each with as many rows as the configuration says."""
    rows = [12] if CONFIG["validate"] is True else CONFIG["validate"] or []
    more = 8 * RANK if CONFIG["uneven"] else 0
    workers = {"num_workers": CONFIG["workers"], "persistent_workers": True} if CONFIG["persistent"] else {}
    return [DataLoader(Mapped(each + more), batch_size=4, **workers) for each in rows]


def loader(kind: str, size: int) -> Any:
    data = {"map": Mapped, "stream": Stream, "sized-stream": SizedStream}[kind](size)
    made = StatefulDataLoader if CONFIG["stateful"] else DataLoader
    shuffle = {"shuffle": True} if kind == "map" else {}
    if CONFIG["weighted"]:
        own = torch.Generator().manual_seed(7)
        shuffle = {"sampler": WeightedRandomSampler(range(1, size + 1), size, generator=own)}
    if CONFIG["distributed"]:
        shuffle = {"sampler": DistributedSampler(data, int(os.environ.get("WORLD_SIZE", "1")), RANK)}
    workers = CONFIG["workers"]
    persistent = {"persistent_workers": True} if CONFIG["persistent"] else {}
    return made(data, batch_size=CONFIG["batch"], num_workers=workers, **shuffle, **persistent)


def together(batch: Any) -> list[torch.Tensor]:
    """Return the samples of all loaders as one batch; one that is at its end may give none."""
    parts = [each for each in batch.values() if each is not None]
    return [torch.cat(each) for each in zip(*parts, strict=True)]


# ---- Model


class Model(pl.LightningModule):
    def __init__(self, **hyperparameters: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(CONFIG["seed"])
        body = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, CONFIG["width"]),
            torch.nn.LayerNorm(CONFIG["width"]) if CONFIG["rows"] else torch.nn.BatchNorm1d(CONFIG["width"]),
            Growing() if CONFIG["grows"] else torch.nn.ReLU(),
            torch.nn.Dropout(CONFIG["dropout"]),
            torch.nn.Linear(CONFIG["width"], CONFIG["width"]),
            torch.nn.Dropout(CONFIG["dropout"]),
        )
        self.body = torch.compile(body, backend="eager") if CONFIG["compiled"] else body
        self.head = torch.nn.Linear(CONFIG["width"], CONFIG["outputs"])
        self.automatic_optimization = not CONFIG["manual"]
        self.average: Ema | None = None
        self.learning_rate = 5e-3
        self.batches = 0
        self.recent: collections.deque[float] = collections.deque(maxlen=3)

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, Flattening) and not isinstance(self.body, FullyShardedDataParallel):
            here = {"device_id": torch.device("cpu"), "use_orig_params": True}
            self.body, self.head = (FullyShardedDataParallel(each, **here) for each in (self.body, self.head))
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            if CONFIG["tensor"] > 1:
                plan = {name: ColwiseParallel(output_layouts=Replicate()) for name in ("0", "4")}
                parallelize_module(self.body, self.device_mesh["tensor_parallel"], plan)
            for part in (self.body, self.head):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(CONFIG["slow"])
        x, y = together(batch) if CONFIG["combined"] else batch
        step = self.global_step
        x = augmented_on_device(x)
        loss = (self(x.to(self.head.weight.dtype)).float() - y.float()).square().mean()
        if CONFIG["holding"]:
            self.batches += 1
            loss = loss * (1 + self.batches / 50 + sum(self.recent) / 100)
            self.recent.append(min(loss.item(), 1.0))
        optimizers = self.optimizers()
        rate = (optimizers[0] if isinstance(optimizers, list) else optimizers).param_groups[0]["lr"]
        at = {"step": step, "micro": batch_idx, "epoch": self.current_epoch}
        at |= {"tuned": [self.learning_rate, self.trainer.datamodule.batch_size]} if CONFIG["tuned"] else {}
        rows = {"rows": [digest(row) for row in x], "mean": loss.item()} if CONFIG["rows"] else {}
        if not is_tuning(self.trainer):
            trace(**at, loss=loss.item().hex(), batch=digest(x), lr=float(rate).hex(), **rows)
        if CONFIG["manual"]:
            self.step_by_hand(loss, batch_idx)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return None if CONFIG["manual"] else loss

    def step_by_hand(self, loss: torch.Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()
        self.manual_backward(loss)
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y = batch
        event("validation_step", self.global_step)
        added = (torch.rand(1) * 0.01).to(x.device)
        loss = (self(x.to(self.head.weight.dtype)).float() - y.float()).square().mean()
        self.log("val_loss", loss + added, on_step=CONFIG["trackers"], on_epoch=True)
        trace(validated=self.global_step, value=(loss + added).item().hex())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.average is not None and not self.trainer.fit_loop._should_accumulate():
            self.average.update()

    def configure_optimizers(self) -> Any:
        def schedule(optimizer: Any) -> Any:
            warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 6) * 0.99**step)
            if CONFIG["decays"]:
                total = self.trainer.estimated_stepping_batches
                warm = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)
            return {"scheduler": warm, "interval": "step"}

        if CONFIG["manual"]:
            pair = [
                torch.optim.AdamW(self.body.parameters(), lr=5e-3),
                torch.optim.SGD(self.head.parameters(), lr=1e-3, momentum=0.9),
            ]
            return pair, [schedule(pair[0]), schedule(pair[1])]
        kind = getattr(torch.optim, CONFIG["optimizer"])
        optimizer = kind(self.parameters(), lr=self.learning_rate, weight_decay=0.1)
        if CONFIG["callbacks"] == "finetuning":
            trained = [each for each in self.parameters() if each.requires_grad]
            return torch.optim.AdamW(trained, lr=5e-3, weight_decay=0.1)
        if CONFIG["plateau"]:
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, **CONFIG["plateau"]}}
        return {"optimizer": optimizer, "lr_scheduler": schedule(optimizer)}


def is_tuning(trainer: Any) -> bool:
    """Return whether a finder trains: it takes the other callbacks away."""
    return bool(CONFIG["tuned"]) and not trainer.checkpoint_callbacks


class Data(pl.LightningDataModule):
    """Has the batch size that a finder sets, and makes its loaders with it."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = CONFIG["batch"]

    def train_dataloader(self) -> Any:
        return DataLoader(Mapped(CONFIG["samples"]), batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> Any:
        return validation_data()


class TuningEpochs(pl.callbacks.LearningRateFinder):
    """Searches at the start of some epochs, as Lightning's documentation does."""

    def on_fit_start(self, *args: Any) -> None:
        pass

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch in (0, 2):
            self.lr_find(trainer, pl_module)


class Fetching(Model):
    """Takes its batches from the loader by itself."""

    def training_step(self, dataloader_iter: Any) -> Any:
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


class Finetuning(pl.callbacks.BaseFinetuning):
    """Trains the head alone first, and a further layer, in a group of its own, in each epoch that follows."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.body)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        layers = {1: pl_module.body[4], 2: pl_module.body[0]}
        if epoch in layers:
            self.unfreeze_and_add_param_group(layers[epoch], optimizer, lr=1e-3)


class Unfreezing(pl.Callback):
    """Trains a layer only from some batch on, which it counts; it has no ``state_dict()``."""

    def __init__(self) -> None:
        self.batches = self.epochs = 0

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.body[0].weight.requires_grad_(False)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.epochs += 1

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        self.batches += 1
        if self.batches == 20:
            pl_module.body[0].weight.requires_grad_(True)


class Striking(pl.Callback):
    """Reports to the job's shared part where the trainer is, at one kind of event; after every ModelCheckpoint."""

    def __init__(self, name: str) -> None:
        setattr(self, name, lambda trainer, *rest: event(name, trainer.global_step))


DEFAULTS: dict[str, Any] = {
    "seed": 0,
    "width": 16,
    "samples": 100 if "WORLD_SIZE" in os.environ else 52,
    "batch": 4,
    "elastic": False,
    "rows": False,
    "distributed": False,
    "decays": False,
    "dropout": 0.2,
    "data": "map",
    "stateful": False,
    "weighted": False,
    "combined": None,
    "workers": 0,
    "persistent": False,
    "augment": False,
    "own_generator": False,
    "register_generator": False,
    "manual": False,
    "optimizer": "AdamW",
    "tuned": None,
    "callbacks": None,
    "fetching": False,
    "compiled": False,
    "plateau": None,
    "average": None,
    "module_average": False,
    "patience": None,
    "validate": False,
    "uneven": False,
    "holding": False,
    "hyperparameters": {},
    "odd_hyperparameters": False,
    "checkpoints": [{}],
    "late_removal": False,
    "logger": False,
    "trackers": False,
    "io": True,
    "async_io": False,
    "ckpt_path": "last",
    "kill_at_opening": None,
    "strategy": "auto",
    "sharded": True,
    "dump": False,
    "tensor": 1,
    "zero": 0,
    "outputs": 1,
    "engine": {},
    "callback": {},
    "callback_off": False,
    "trace_files": True,
    "trainer": {},
}


def main() -> None:
    configure("out", DEFAULTS)
    if CONFIG["kill_at_opening"]:
        kill_at_opening(CONFIG["kill_at_opening"])
    warnings.simplefilter("ignore")
    if CONFIG["cycles"]:
        cycles.train_in_cycles(Cycles())
        return
    seed = CONFIG["seed"]
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    hyperparameters: dict[str, Any] = dict(CONFIG["hyperparameters"])
    if CONFIG["odd_hyperparameters"]:
        more = {"path": Path("a"), "space": argparse.Namespace(a=1), "number": np.float64(0.5)}
        hyperparameters |= more
    model = (Fetching if CONFIG["fetching"] else Model)(**hyperparameters)
    model.average = Ema(model) if CONFIG["module_average"] else None
    train = training_data()
    trainer = new_trainer(model, train)
    if CONFIG["tuned"]:
        tune_and_fit(trainer, model)
    else:
        trainer.fit(model, train, validation_data() or None, ckpt_path=CONFIG["ckpt_path"])
    finish(trainer, model)
    if CONFIG["trackers"]:
        trainer.loggers[-1].experiment.finish()  # a forked job ends without what W&B registers for the end


FINDER = {"min_lr": 1e-4, "max_lr": 1e-1}


def tune_and_fit(trainer: pl.Trainer, model: Model) -> None:
    """Let a Tuner search before the training, where no callback does, and train."""
    data, tuner = Data(), pl.tuner.Tuner(trainer)
    if CONFIG["tuned"] == "lr_find":
        tuner.lr_find(model, datamodule=data, num_training=24, **FINDER)
    if CONFIG["tuned"] == "scale_batch_size":
        tuner.scale_batch_size(model, datamodule=data, init_val=3, max_trials=2)
    trainer.fit(model, datamodule=data, ckpt_path=CONFIG["ckpt_path"])


def new_trainer(model: Model, train: Any, **more: Any) -> pl.Trainer:
    nodes = 2 if CONFIG["own_disk"] else 1
    return pl.Trainer(
        **{
            "max_epochs": 3,
            "accumulate_grad_batches": 1 if CONFIG["manual"] or CONFIG["callbacks"] == "accumulation" else 2,
            "accelerator": accelerator(),
            "devices": int(os.environ.get("WORLD_SIZE", "1")) // nodes,
            "num_nodes": nodes,
            "strategy": strategy(),
            "logger": loggers(),
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "callbacks": callbacks(model, train),
            "plugins": plugins(),
            "log_every_n_steps": 4,
            "num_sanity_val_steps": 2,
            "use_distributed_sampler": not CONFIG["elastic"],
            **CONFIG["trainer"],
            **more,
        }
    )


class Cycles:
    """One module and its loaders for all runs; a run that finished is trained further by the trainer that it has."""

    event = "on_train_batch_end"

    def __init__(self) -> None:
        self.model = Model()
        self.train_data = training_data()
        self.validation_data = validation_data() or None
        self.trainer: Any = None
        self.directory = ""

    def prepare(self, cycle: cycles.Cycle, run_directory: str) -> None:
        if self.directory == run_directory and cycle.run == "longer":
            self.trainer.fit_loop.epoch_loop.max_steps = cycle.steps
            return
        self.directory = run_directory
        CONFIG["checkpoints"] = [{"dirpath": run_directory, "every_n_train_steps": 1}]
        more: dict[str, Any] = {"max_steps": cycle.steps, "max_epochs": -1}
        if CONFIG["logger"]:
            more["logger"] = pl.loggers.TensorBoardLogger(run_directory, name="logs", version=0)
        self.trainer = new_trainer(self.model, self.train_data, **more)

    def train(self) -> None:
        self.trainer.fit(self.model, self.train_data, self.validation_data)

    def outline(self) -> dict[str, Any]:
        trainer = self.trainer
        loops = [trainer.fit_loop, trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.val_loop]
        connectors = [trainer._checkpoint_connector, trainer._signal_connector, trainer._logger_connector]
        patched = [trainer, trainer.strategy, self.model, *loops, *connectors, *trainer.callbacks]
        return {
            "callbacks": [type(each).__name__ for each in trainer.callbacks],
            "hidden": [cycles.hidden(each) for each in patched],
            "managed": [each._is_managed for each in [trainer.strategy.checkpoint_io] if hasattr(each, "_is_managed")],
            "hooks": cycles.hooks(module=self.model),
            "resuming": [each._resuming is None for each in trainer.callbacks if hasattr(each, "_resuming")],
        }


def loggers() -> Any:
    if CONFIG["trackers"]:
        from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger

        from resume_adapters import tracker_run

        return [
            TensorBoardLogger("runs", version=0),
            MLFlowLogger(tracking_uri=os.environ["MLFLOW_TRACKING_URI"], run_id=tracker_run("out", "mlflow")),
            WandbLogger(id=tracker_run("out", "wandb")),
        ]
    return CSVLogger("logs", flush_logs_every_n_steps=1) if CONFIG["logger"] else False


def kill_at_opening(name: str) -> None:
    """Kill this process when it is about to write the first byte of a file in the run directory."""

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        path = Path(str(arguments[0])) if event == "open" and "w" in str(arguments[1]) else Path()
        if path.name.startswith(name) and "out" in path.parts:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(audit)


def accelerator() -> Any:
    if CONFIG["device"] != "walled":
        return CONFIG["device"]
    from device.walled import lightning_accelerator

    return lightning_accelerator(pl.accelerators.Accelerator)


class LoadingByHand(pl.Callback):
    """Loads what another training has saved."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        load_by_hand(pl_module, trainer.optimizers[0])


class Beginning(pl.Callback):
    """Changes what is trained, counts, and begins an average, where the training begins."""

    def __init__(self) -> None:
        self.begun, self.average = 0, torch.zeros(())

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.begun += 1
        self.average = next(pl_module.parameters()).detach().mean()
        for _ in range(self.begun):
            begin(trainer.optimizers[0])

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *given: Any) -> None:
        self.average.mul_(0.9).add_(next(pl_module.parameters()).detach().mean(), alpha=0.1)
        with torch.no_grad():
            next(pl_module.parameters()).add_(self.average, alpha=1e-3 * self.begun)

    def state_dict(self) -> dict[str, Any]:
        return {"begun": self.begun, "average": self.average}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.begun, self.average = state_dict["begun"], state_dict["average"]


class Dumping(pl.Callback):
    """Writes down what was loaded."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        dump_loaded(pl_module, trainer.optimizers[0])


class Flattening(FSDPStrategy):
    """FSDP1, which Lightning itself refuses on a CPU."""


def strategy() -> Any:
    if CONFIG["device"] == "walled" and "WORLD_SIZE" in os.environ:
        from device.walled import lightning_ddp

        return lightning_ddp(DDPStrategy, int(os.environ["WORLD_SIZE"]))
    if CONFIG["device"] == "walled":
        return SingleDeviceStrategy(torch.device(CONFIG["device"], 0))
    if CONFIG["strategy"] == "auto" and "WORLD_SIZE" in os.environ:
        return "ddp"
    if CONFIG["strategy"] == "fsdp1":
        return Flattening(state_dict_type="sharded" if CONFIG["sharded"] else "full", process_group_backend="gloo")
    if CONFIG["strategy"] == "fsdp2":
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        tensor = CONFIG["tensor"]
        return ModelParallelStrategy(ranks // tensor, tensor, save_distributed_checkpoint=CONFIG["sharded"])
    if CONFIG["strategy"] == "deepspeed":
        return lightning_deepspeed_on_cpu(
            stage=CONFIG["zero"], logging_batch_size_per_gpu=CONFIG["batch"], **CONFIG["engine"]
        )
    return CONFIG["strategy"]


def plugins() -> list[Any]:
    if CONFIG["async_io"]:
        from lightning.pytorch.plugins.io import AsyncCheckpointIO

        return [AsyncCheckpointIO()]
    if CONFIG["bare"] or not CONFIG["io"]:
        return []
    from resume_adapters.lightning import ResumeCheckpointIO

    return [ResumeCheckpointIO()]


def callbacks(model: Model, train: Any) -> list[Any]:
    found: list[Any] = [Dumping()] if CONFIG["dump"] else []
    if CONFIG["loads"]:
        found.append(LoadingByHand())
    if CONFIG["begins"]:
        found.append(Beginning())
    if CONFIG["average"] == "ema":
        found.append(pl.callbacks.EMAWeightAveraging(decay=0.9))
    if CONFIG["average"] == "mean":
        found.append(pl.callbacks.WeightAveraging())
    if CONFIG["holding"]:
        found.append(Unfreezing())
    if CONFIG["callbacks"] == "finetuning":
        found.append(Finetuning())
    if CONFIG["callbacks"] == "accumulation":
        found.append(pl.callbacks.GradientAccumulationScheduler({1: 3, 2: 2}))
    if CONFIG["tuned"] == "learning rate":
        found.append(pl.callbacks.LearningRateFinder(num_training_steps=24, **FINDER))
    if CONFIG["tuned"] == "learning rate of epochs":
        found.append(TuningEpochs(num_training_steps=24, **FINDER))
    if CONFIG["tuned"] == "batch size":
        found.append(pl.callbacks.BatchSizeFinder(init_val=3, max_trials=2))
    if CONFIG["patience"]:
        found.append(EarlyStopping("val_loss", patience=CONFIG["patience"], min_delta=0.05))
    for options in CONFIG["checkpoints"]:
        place = {} if CONFIG["logger"] == "placeless" else {"dirpath": "out"}
        defaults = {**place, "every_n_train_steps": 5, "save_top_k": -1}
        kind = LateCheckpoint if CONFIG["late_removal"] else ModelCheckpoint
        found.append(kind(**{**defaults, **options}))
    if not CONFIG["bare"] and not CONFIG["callback_off"]:
        found.append(resume_callback(model, train))
    # ModelCheckpoints go to the end of the list, so this does only by being one.
    found += [_Last(CONFIG[name]["event"]) for name in ("kill", "send", "fail", "hold_writes") if CONFIG[name]]
    return found


class LateCheckpoint(ModelCheckpoint):
    """On all ranks but the first, it removes a checkpoint when a commit may have pruned it."""

    def _remove_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        strategy: Any = trainer.strategy
        native = strategy.broadcast

        def late(*given: Any) -> Any:
            found = native(*given)
            time.sleep(0 if trainer.is_global_zero else 0.5)
            return found

        strategy.broadcast = late
        super()._remove_checkpoint(trainer, filepath)
        del strategy.broadcast


class _Last(Striking, pl.callbacks.Checkpoint):
    pass


def resume_callback(model: Model, train: Any) -> Any:
    from resume_adapters.lightning import ResumeCallback

    parts = {"average": model.average} if model.average else {}
    if CONFIG["register_generator"]:
        parts["generator"] = train.dataset.generator
    return ResumeCallback(resume=resume_option(), keep=policy(), **CONFIG["callback"], **parts)


def finish(trainer: Any, model: Model) -> None:
    saving = [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
    trace(
        final=True,
        weights=digest(*weights(model)),
        values=[value for each in weights(model) for value in each.flatten().tolist()] if CONFIG["rows"] else None,
        moments=digest(*(whole(each) for each in moments(trainer))),
        strategy=type(trainer.strategy).__name__,
        engine=engine_facts(trainer.strategy.deepspeed_engine) if CONFIG["strategy"] == "deepspeed" else None,
        share=share(model),
        global_step=trainer.global_step,
        epoch=trainer.current_epoch,
        logged={name: float(value).hex() for name, value in trainer.callback_metrics.items()},
        best=[[os.path.basename(each.best_model_path), str(each.best_model_score)] for each in saving],
        files=sorted(path.name for path in Path("out").glob("*.ckpt")) if CONFIG["trace_files"] else None,
        average=[digest(*model.average.shadow), model.average.updates] if model.average else None,
        held=[[each.batches, each.epochs] for each in trainer.callbacks if isinstance(each, Unfreezing)],
        draws=draws(),
    )


def weights(model: Model) -> list[torch.Tensor]:
    """Return the weights and the buffers, gathered from all ranks if they are sharded."""
    if CONFIG["strategy"] == "deepspeed" and CONFIG["zero"] == 3:
        return whole_weights(model)
    return [whole(each) for each in model.state_dict().values()]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, gathered from its shards if it has any."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def share(model: Model) -> float:
    """Return how much of the weights this rank holds."""
    held = [each.to_local() if isinstance(each, DTensor) else each for each in model.parameters()]
    return sum(each.numel() for each in held) / max(sum(each.numel() for each in model.parameters()), 1)


def moments(trainer: Any) -> list[torch.Tensor]:
    """Return what the optimizers remember of each parameter."""
    states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
    return [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]


if __name__ == "__main__":
    main()
