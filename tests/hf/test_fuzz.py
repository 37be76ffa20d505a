"""Whatever damages a run directory, a start resumes from what was committed, or says what is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from resume_adapters.core.checkpoint.files import CheckpointFiles
from resume_adapters.core.checkpoint.native_files import read_weight_files
from resume_adapters.hf import files
from resume_adapters.hf.records import TrainerRankState

import fuzz


def load(found: CheckpointFiles) -> None:
    weights = files.weights(found)
    files.require_named(found, with_adapters=not weights)
    files.read(found)
    read_weight_files(weights)


@pytest.mark.parametrize("seeds", fuzz.SEEDS)
def test_no_damage_is_loaded_or_ends_in_another_error_than_ours(tmp_path: Path, seeds: Sequence[int]) -> None:
    fuzz.survives_every_damage(tmp_path, "hf/out", files.ForeignCheckpoints(1), TrainerRankState, load, seeds)
