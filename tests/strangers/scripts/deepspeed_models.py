"""What the scripts with DeepSpeed beside this one share: a CPU to train on, a configuration, and what they end with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

import deepspeed_operators  # noqa: F401 - compiled before anything is killed

import ledger
from training import deepspeed_on_cpu

deepspeed_on_cpu()
MOMENTS = ("exp_avg", "exp_avg_sq")


def network() -> torch.nn.Module:
    torch.manual_seed(5)
    layers = torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 2)
    return torch.nn.Sequential(*layers)


def dataset() -> torch.utils.data.Dataset[Any]:
    x = torch.randn(44, 8, generator=torch.Generator().manual_seed(6))
    return torch.utils.data.TensorDataset(x, x.sum(1).sin())


def configuration(name: str, stage: int) -> str:
    """Write a JSON file beside this one to the working directory, with a stage of ZeRO; return its path."""
    config = json.loads((Path(__file__).parent / name).read_text())
    config["zero_optimization"]["stage"] = stage
    Path(name).write_text(json.dumps(config))
    return str(Path(name).resolve())


def end(engine: Any, stage: int, **values: Any) -> None:
    """Write down what an engine ended with; with ZeRO without its padding, which nothing initialises."""
    if stage == 0:
        ledger.end([engine.module], [engine.optimizer], **values)
        return
    state = {
        name: [safe_get_full_fp32_param(each), *(safe_get_full_optimizer_state(each, moment) for moment in MOMENTS)]
        for name, each in engine.module.named_parameters()
    }
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        ledger.end([engine.module], [state], **values)
