"""The DeepSpeed engine beneath Lightning's strategy. DeepSpeed is imported where it trains, and nowhere else."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resume_adapters.core.checkpoint.validity import ForeignStep
from resume_adapters.core.requirements import refuse
from resume_adapters.lightning.checkpoint_io import data_only
from resume_adapters.lightning.compat import pl

if TYPE_CHECKING:
    from resume_adapters.integrations.deepspeed_engine.engine import EngineState

TAG = "checkpoint"
"""What Lightning calls the directory of DeepSpeed's files in a checkpoint."""


def is_used(strategy: Any) -> bool:
    """Return whether DeepSpeed trains."""
    return isinstance(strategy, pl.strategies.DeepSpeedStrategy)


def unsupported(strategy: Any) -> dict[str, object]:
    """Return the settings of the strategy with which no resume is exact, and whether each is in use."""
    if not is_used(strategy):
        return {}
    return {
        "DeepSpeedStrategy(load_full_weights=True) loads no optimizer": strategy.load_full_weights,
        "DeepSpeedStrategy(exclude_frozen_parameters=True) saves no frozen weights": getattr(
            strategy, "exclude_frozen_parameters", False
        ),
    }


def engine_state(strategy: Any, run_directory: Path) -> EngineState | None:
    """Return the state of the engine, where DeepSpeed trains; only after the strategy is set up.

    Raises:
        UnsupportedSetting: a setting of DeepSpeed rules an exact resume out.
    """
    if not is_used(strategy):
        return None
    from resume_adapters.integrations.deepspeed_engine import engine

    return engine.attach_engine(strategy.deepspeed_engine, run_directory)


class ForeignCheckpoints:
    """Recognises the checkpoints that bare Lightning saved with DeepSpeed.

    Args:
        engine: the engine.
    """

    def __init__(self, engine: EngineState) -> None:
        from resume_adapters.integrations.deepspeed_engine import files

        self._of_engine = files.ForeignCheckpoints(engine.engine.dp_world_size, engine.stage)

    def step(self, path: Path) -> ForeignStep | None:
        """Return the step of a checkpoint; ``None`` for anything else."""
        with data_only():
            return self._of_engine.step(path / TAG)

    def require_whole(self, path: Path) -> None:
        """Check that its files are complete."""
        self._of_engine.require_whole(path / TAG)


def require_whole_accumulations(trainer: Any) -> None:
    """Refuse epochs that end while gradients are accumulated.

    DeepSpeed accumulates on into the next epoch, in which Lightning counts its batches from 0. From there on, where
    Lightning counts a step and saves, DeepSpeed is in the middle of one.

    Raises:
        UnsupportedSetting: an epoch is no multiple of the accumulation.
    """
    accumulated, batches = trainer.accumulate_grad_batches, trainer.num_training_batches
    rest = math.isfinite(batches) and batches % accumulated
    refuse({f"accumulate_grad_batches={accumulated} does not divide the {batches} batches of an epoch": rest}, _LIMIT)


def require_no_accumulation(engine: EngineState) -> None:
    """Refuse to save while gradients are accumulated.

    Raises:
        UnsupportedSetting: DeepSpeed holds some.
    """
    refuse(
        {"a checkpoint is due while DeepSpeed accumulates gradients, which it does not save": engine.is_accumulating()},
        _LIMIT,
    )


_LIMIT = (
    "let each epoch have a multiple of accumulate_grad_batches (limit_train_batches), and save and validate after one"
)
