"""What the Slurm job trains: a small model with dropout, slowly, until it was interrupted often enough.

Usage: job.py DIRECTORY. It writes each step's loss to ``trace``, and at its end a digest of the weights to ``final``.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from resume_adapters import StopOn
from resume_adapters.hf import ResumeCallback

DIRECTORY = Path(sys.argv[1])


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))

    def forward(self, x: Any, y: Any) -> dict[str, Any]:
        return {"loss": (self.layers(x) - y).square().mean()}


class Trace(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        time.sleep(float(os.environ.get("SLOW", "0")))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> None:
        if "learning_rate" in logs:
            with open(DIRECTORY / "trace", "a") as file:
                file.write(json.dumps([state.global_step, logs["loss"].hex()]) + "\n")


torch.manual_seed(0)
data = [{"x": torch.randn(8), "y": torch.randn(1)} for _ in range(512)]
args = TrainingArguments(
    output_dir=str(DIRECTORY / "out"),
    max_steps=1500,
    save_steps=10_000,
    save_total_limit=2,
    logging_steps=1,
    logging_nan_inf_filter=False,
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
    dataloader_pin_memory=False,
)
callback = ResumeCallback(
    save_every=timedelta(seconds=3), stop=StopOn(requeue="slurm", reserve=os.environ.get("RESERVE", "auto"))
)
trainer = Trainer(model=Model(), args=args, train_dataset=data, callbacks=[Trace(), callback])
trainer.train()
weights = b"".join(value.numpy().tobytes() for value in trainer.model.state_dict().values())
(DIRECTORY / "final").write_text(hashlib.sha256(weights).hexdigest())
