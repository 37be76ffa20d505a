"""Refuse versions and settings of DeepSpeed under which a resume cannot be exact."""

from __future__ import annotations

from typing import Any

import deepspeed
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.pipe.engine import PipelineEngine

from resume_adapters.core.recovery.attempt import running_attempt
from resume_adapters.core.requirements import refuse, require_version
from resume_adapters.core.session.layout import Layout
from resume_adapters.integrations.deepspeed_engine.recovery import require_reenterable

require_version("deepspeed", deepspeed.__version__, "0.19.8", extra="deepspeed")

_FORGETFUL = ("OnebitAdam", "OnebitLamb", "ZeroOneAdam")
"""Optimizers that reset their error feedback at every load."""


def require_supported(engine: Any, run_dir: str) -> None:
    """Refuse settings under which a resume cannot be exact.

    Raises:
        UnsupportedSetting: naming the setting and what to do.
    """
    optimizer = type(engine.basic_optimizer).__name__
    refused = {
        "a PipelineModule's engine has a loop of its own": isinstance(engine, PipelineEngine),
        "the engine has no optimizer": engine.basic_optimizer is None,
        "layers of experts (MoE) are saved in files of their own, which is not supported": engine.has_moe_layers,
        f"{optimizer} forgets its error feedback whenever it is loaded": optimizer in _FORGETFUL,
        "offload to NVMe leaves state in the swap files": engine.zero_nvme_offload_optimizer(),
        "zenflow and super_offload step in another thread": bool(engine.zenflow or engine.super_offload()),
        '"load_universal": true converts a checkpoint on the way': engine.load_universal_checkpoint(),
        '"checkpoint": {"writer": ...} and other checkpoint engines still write after a save has returned': (
            type(engine.checkpoint_engine) is not TorchCheckpointEngine
        ),
        "curriculum learning chooses the data by its own state": engine.curriculum_learning_enabled(),
        f"DeepSpeed takes *, ? and [ in {run_dir!r} for a pattern when it loads": bool(set(run_dir) & set("*?[")),
    }
    refuse(refused)
    Layout({"model parallelism": engine.mp_world_size, "sequence parallelism": engine.sequence_parallel_size})
    if running_attempt() is not None:
        require_reenterable(engine)
