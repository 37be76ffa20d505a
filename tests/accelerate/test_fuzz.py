"""Whatever damages a run directory, a start resumes from what was committed, or says what is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from resume_adapters.accelerate import files
from resume_adapters.core.checkpoint.files import CheckpointFiles
from resume_adapters.core.checkpoint.native_files import read_weight_files
from resume_adapters.core.loop.checkpointing import LoopRankState

import fuzz


def load(found: CheckpointFiles) -> None:
    read_weight_files([files.weights(found, 0)])
    for kind in ("optimizer", "scheduler"):
        files.pickled(found, kind, 0)


@pytest.mark.parametrize("seeds", fuzz.SEEDS)
def test_no_damage_is_loaded_or_ends_in_another_error_than_ours(tmp_path: Path, seeds: Sequence[int]) -> None:
    fuzz.survives_every_damage(
        tmp_path, "accelerate/project/checkpoints", files.ForeignCheckpoints(1), LoopRankState, load, seeds
    )
