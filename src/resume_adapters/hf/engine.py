"""The DeepSpeed engine beneath a trainer. DeepSpeed is imported where it trains, and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from resume_adapters.core.checkpoint.validity import ForeignDetector
from resume_adapters.integrations.deepspeed_engine import names

if TYPE_CHECKING:
    from resume_adapters.integrations.deepspeed_engine.engine import EngineState


def foreign(trainer: Any, world_size: int) -> ForeignDetector | None:
    """Return what recognises the checkpoints of the engine alone, where DeepSpeed trains."""
    if not trainer.is_deepspeed_enabled:
        return None
    from resume_adapters.integrations.deepspeed_engine import files

    return files.ForeignCheckpoints(world_size, _stage(trainer))


def invariants(trainer: Any) -> dict[str, int]:
    """Return what DeepSpeed, where it trains, needs to be as it was when the checkpoint was saved."""
    return names.invariants(_stage(trainer), trainer.args.world_size) if trainer.is_deepspeed_enabled else {}


def _stage(trainer: Any) -> int:
    return int(trainer.accelerator.state.deepspeed_plugin.zero_stage)


def attach_engine(deepspeed: Any, run_directory: Path) -> EngineState:
    """Return the state of an engine.

    Raises:
        UnsupportedSetting: a setting rules an exact resume out.
    """
    from resume_adapters.integrations.deepspeed_engine import engine

    return engine.attach_engine(deepspeed, run_directory)
