"""Small training jobs for the benchmarks, bare or with the callback."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks.stack import Rows, Stack
from resume_adapters.hf import ResumeCallback

NEVER = 10**9


class Clock(TrainerCallback):
    """Timestamps the end of each step, and each save's return to the training loop."""

    def __init__(self, after_save: Callable[[Path], None] = lambda checkpoint: None) -> None:
        self.steps: list[float] = []
        self.saves: list[float] = []
        self._after_save = after_save

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append(time.perf_counter())

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.saves.append(time.perf_counter() - self.steps[-1])
        self._after_save(Path(args.output_dir) / f"checkpoint-{state.global_step}")


def trainer(
    output: Path,
    *,
    width: int,
    layers: int,
    steps: int,
    save_every: int = NEVER,
    workers: int = 0,
    callbacks: list[TrainerCallback],
) -> Trainer:
    """Return a trainer of a :class:`Stack` on the CPU that does nothing but train and save."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    arguments = TrainingArguments(
        output_dir=str(output),
        max_steps=steps,
        per_device_train_batch_size=1,
        save_strategy="steps",
        save_steps=save_every,
        logging_strategy="no",
        dataloader_num_workers=workers,
        optim="adamw_torch",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
    )
    return Trainer(model=Stack(width, layers), args=arguments, train_dataset=Rows(width), callbacks=callbacks)


def callbacks(with_callback: bool, clock: Clock) -> list[TrainerCallback]:
    """Return the callbacks of a job; the clock comes last."""
    return [ResumeCallback(stage="memory"), clock] if with_callback else [clock]


def sync_tree(directory: Path) -> None:
    """Force a directory and its files onto the disk."""
    for path in [*directory.iterdir(), directory]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
