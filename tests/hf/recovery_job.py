"""A Trainer in a restartable block. Started by ``recovering.results``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState

import staged
from resume_adapters.hf import ResumeCallback

from recovering import FAULTS, RANK, Data, Net, Optimizer, ending, run_cases
from training import accelerate_shards_on_cpu, deepspeed_on_cpu, use_walled


class Model(Net):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:  # type: ignore[override]
        found = super().forward(x)
        return {"loss": torch.nn.functional.cross_entropy(found, labels), "logits": found}


class Named(Data):
    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return {"x": x, "labels": y}


class Steps(TrainerCallback):
    def __init__(self, steps: dict[str, Any]) -> None:
        self.steps = steps

    def on_pre_optimizer_step(self, *given: Any, **named: Any) -> None:
        FAULTS.at("clipped")

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.steps[str(state.global_step)] = given["lr_scheduler"].get_last_lr()

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        FAULTS.at("save")


class Counting(TrainerCallback, ExportableState):
    """Counts within steps and within evaluations, and lets the trainer save its count."""

    def __init__(self, steps: dict[str, Any]) -> None:
        self.steps, self.count = steps, 0

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"count": self.count}}

    def on_step_begin(self, *given: Any, **named: Any) -> None:
        self.count += 1

    def on_prediction_step(self, *given: Any, **named: Any) -> None:
        self.count += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self.steps[f"count at {state.global_step}"] = self.count


class Own(Trainer):
    """Makes its optimizer itself, as it does with DeepSpeed and FSDP in any case."""

    def create_optimizer(self, *given: Any) -> Any:
        self.optimizer = self.made = Optimizer(self.model.parameters(), 1e-2)
        return self.optimizer


def engine_config() -> dict[str, Any] | None:
    """Return a configuration of DeepSpeed, where the environment has a stage."""
    if "ZERO" not in os.environ:
        return None
    deepspeed_on_cpu()
    return {
        "zero_optimization": {"stage": int(os.environ["ZERO"])},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def sharding() -> dict[str, Any]:
    """Return what shards the model, where the environment has a type of state dicts."""
    if "DEVICE" in os.environ:
        use_walled()
        return {"ddp_find_unused_parameters": False}
    if "FSDP" not in os.environ:
        return {"use_cpu": True}
    accelerate_shards_on_cpu()
    kind = {"fsdp_version": 2, "state_dict_type": os.environ["FSDP"], "transformer_layer_cls_to_wrap": ["Linear"]}
    return {"fsdp": "full_shard", "fsdp_config": kind}


def train(attempt: Any, directory: Path, steps: dict[str, Any]) -> dict[str, str]:
    arguments = TrainingArguments(
        str(directory),
        num_train_epochs=2,
        per_device_train_batch_size=4,
        logging_steps=3,
        eval_strategy="steps",
        eval_steps=4,
        save_strategy="steps",
        save_steps=5,
        report_to=[],
        disable_tqdm=True,
        seed=3,
        deepspeed=engine_config(),
        **sharding(),
    )
    torch.manual_seed(5 + RANK)
    model = Model()
    optimizer = Optimizer(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    is_given = arguments.deepspeed is None and not {"FSDP", "DEVICE"} & os.environ.keys()
    trainer = (Trainer if is_given else Own)(
        model,
        arguments,
        train_dataset=Named(),
        eval_dataset=Named(16, "evaluation"),
        callbacks=[ResumeCallback(**staged.OPTIONS), Steps(steps), Counting(steps)],
        optimizers=(optimizer, schedule) if is_given else (None, None),
    )
    FAULTS.step = lambda: trainer.state.global_step
    trainer.train()
    logs = [
        {key: value for key, value in each.items() if "_per_" not in key and "runtime" not in key}
        for each in trainer.state.log_history
    ]
    steps["logs"] = [logs, trainer.state.total_flos]
    return ending(model, optimizer if is_given else trainer.made)


run_cases(train, json.loads(sys.argv[1]))
