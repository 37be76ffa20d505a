"""Whatever damages a run directory, a start resumes from what was committed, or says what is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from resume_adapters.core.checkpoint.files import CheckpointFiles
from resume_adapters.core.loop.checkpointing import LoopRankState
from resume_adapters.integrations.deepspeed_engine import files

import fuzz


def load(found: CheckpointFiles) -> None:
    files.require_named(found)
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        files.read(found.require(name))


@pytest.mark.parametrize("seeds", fuzz.SEEDS)
def test_no_damage_is_loaded_or_ends_in_another_error_than_ours(tmp_path: Path, seeds: Sequence[int]) -> None:
    fuzz.survives_every_damage(tmp_path, "deepspeed/out", files.ForeignCheckpoints(1, 1), LoopRankState, load, seeds)
