"""The DeepSpeed engine beneath a trainer. DeepSpeed is imported where it trains, and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from resume_adapters import _zero_names as names
from resume_adapters.core.listing import Foreign

if TYPE_CHECKING:
    from resume_adapters._zero_engine import EngineState


def foreign(trainer: Any, world_size: int) -> Foreign | None:
    """Return what recognises the checkpoints of the engine alone, where DeepSpeed trains."""
    if not trainer.is_deepspeed_enabled:
        return None
    from resume_adapters import _zero_files

    return _zero_files.Foreign(world_size, _stage(trainer))


def fixed(trainer: Any) -> dict[str, int]:
    """Return what DeepSpeed, where it trains, needs to be as it was when the checkpoint was saved."""
    return names.fixed(_stage(trainer), trainer.args.world_size) if trainer.is_deepspeed_enabled else {}


def _stage(trainer: Any) -> int:
    return int(trainer.accelerator.state.deepspeed_plugin.zero_stage)


def adopt(engine: Any, run_directory: Path) -> EngineState:
    """Return the state of an engine.

    Raises:
        UnsupportedSetting: a setting rules an exact resume out.
    """
    from resume_adapters import _zero_engine

    return _zero_engine.adopt(engine, run_directory)
