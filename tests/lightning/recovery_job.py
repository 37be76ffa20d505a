"""A Lightning trainer in a restartable block. Started by ``recovering.results``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard

import staged
from resume_adapters.lightning import ResumeCallback
from resume_adapters.lightning.compat import pl

from recovering import FAULTS, RANK, Data, Net, Optimizer, ending, run_cases
from training import lightning_deepspeed_on_cpu, use_walled


class Module(pl.LightningModule):  # type: ignore[misc]  # known at run time
    def __init__(self, steps: dict[str, Any]) -> None:
        super().__init__()
        self.net, self.steps = Net(), steps

    def configure_model(self) -> None:
        if "FSDP" in os.environ:
            for part in (self.net.first, self.net.last, self.net):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.steps[str(self.trainer.global_step)] = [loss.item(), x.sum().item()]
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        x, y = batch
        self.log("validation", torch.nn.functional.cross_entropy(self.net(x), y), sync_dist=True)

    def on_train_epoch_end(self) -> None:
        logged = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        self.steps[f"epoch {self.current_epoch}"] = logged

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        FAULTS.at("save")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        FAULTS.at("clipped")

    def configure_optimizers(self) -> Any:
        self.made = Optimizer(self.parameters(), 1e-2)
        if "PLATEAU" in os.environ:  # moves after the hooks of the epoch's end, unlike others
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.made, factor=0.5, patience=0, threshold=10.0)
            return [self.made], [{"scheduler": plateau, "monitor": "loss"}]
        schedule = torch.optim.lr_scheduler.StepLR(self.made, 3, 0.5)
        return [self.made], [{"scheduler": schedule, "interval": "step"}]


class Counting(pl.Callback):  # type: ignore[misc]  # known at run time
    """Counts within steps and within validations, and lets Lightning save its count."""

    def __init__(self, steps: dict[str, Any]) -> None:
        self.steps, self.count = steps, 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]

    def on_train_batch_start(self, *given: Any) -> None:
        self.count += 1

    def on_validation_batch_start(self, *given: Any) -> None:
        self.count += 1

    def on_train_batch_end(self, trainer: Any, *given: Any) -> None:
        self.steps[f"count at {trainer.global_step}"] = self.count


class CountedData(pl.LightningDataModule):  # type: ignore[misc]  # known at run time
    """Counts the batches that it has moved, and lets Lightning save its count."""

    def __init__(self, steps: dict[str, Any]) -> None:
        super().__init__()
        self.steps, self.count = steps, 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(Data(), batch_size=4, shuffle=True)

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(Data(16, "evaluation"), batch_size=4)

    def on_after_batch_transfer(self, batch: Any, index: int) -> Any:
        self.count += 1
        self.steps[f"moved at {self.trainer.global_step}"] = self.count
        return batch


def strategy(ranks: int) -> Any:
    """Return how it trains; by a DeepSpeed engine or in shards, where the environment says so."""
    if "ZERO" in os.environ:
        return lightning_deepspeed_on_cpu(stage=int(os.environ["ZERO"]), logging_batch_size_per_gpu=4)
    if "FSDP" in os.environ:
        strategy = pl.strategies.ModelParallelStrategy
        return strategy(ranks, 1, save_distributed_checkpoint=os.environ["FSDP"] == "SHARDED_STATE_DICT")
    if "DEVICE" in os.environ:
        from device.walled import lightning_ddp

        return lightning_ddp(pl.strategies.DDPStrategy, ranks)
    return "ddp" if ranks > 1 else "auto"


def accelerator() -> Any:
    if "DEVICE" not in os.environ:
        return "cpu"
    use_walled()
    from device.walled import lightning_accelerator

    return lightning_accelerator(pl.accelerators.Accelerator)


def train(attempt: Any, directory: Path, steps: dict[str, Any]) -> dict[str, str]:
    pl.seed_everything(3 + RANK)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator=accelerator(),
        devices=ranks,
        strategy=strategy(ranks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        val_check_interval=4,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        callbacks=[
            pl.callbacks.ModelCheckpoint(dirpath=directory, every_n_train_steps=5, save_top_k=-1),
            ResumeCallback(**staged.OPTIONS),
            Counting(steps),
        ],
    )
    FAULTS.step = lambda: trainer.global_step
    module = Module(steps)
    trainer.fit(module, datamodule=CountedData(steps))
    return ending(module, module.made)


run_cases(train, json.loads(sys.argv[1]))
