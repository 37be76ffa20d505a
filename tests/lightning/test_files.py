"""A checkpoint is data, whichever way Lightning reads it."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy

from resume_adapters.errors import CheckpointDamaged, SaveFailed
from resume_adapters.lightning import ResumeCheckpointIO, checkpoint_io


def test_a_save_that_fails_leaves_the_file_before(tmp_path: Path) -> None:
    """Whoever saves: alone the error is raised at once, with a callback when it asks."""
    plugin, file = ResumeCheckpointIO(), tmp_path / "a.ckpt"
    plugin.save_checkpoint({"global_step": 1}, file)
    before = file.read_bytes()
    (tmp_path / ".a.ckpt.tmp").mkdir()  # cannot be written
    with pytest.raises(SaveFailed, match=r"a\.ckpt could not be written"):
        plugin.save_checkpoint({"global_step": 2}, file)
    with plugin.managed():
        plugin.save_checkpoint({"global_step": 2}, file)
        with pytest.raises(IsADirectoryError):
            plugin.raise_error()
        plugin.raise_error()
    assert file.read_bytes() == before


class Code:
    def __init__(self, directory: Path) -> None:
        self.directory = str(directory)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.directory,)


WAYS: dict[str, Callable[[Path], Any]] = {
    "alone": lambda path: ResumeCheckpointIO().load_checkpoint(path),
    "strategy": lambda path: SingleDeviceStrategy().load_checkpoint(path),
}


@pytest.mark.parametrize("way", WAYS)
def test_no_code_of_a_checkpoint_is_run(way: str, tmp_path: Path) -> None:
    file = tmp_path / "a.ckpt"
    torch.save({"state_dict": {}, "odd": Code(tmp_path / "executed")}, file)
    with checkpoint_io.data_only(), pytest.raises(pickle.UnpicklingError, match="mkdir"):
        WAYS[way](file)
    assert not (tmp_path / "executed").exists()


def test_a_file_that_fsdp_would_unpickle_freely_is_refused_before(tmp_path: Path) -> None:
    file = tmp_path / "a.ckpt"
    torch.save({"odd": Code(tmp_path / "executed")}, file)
    with pytest.raises(CheckpointDamaged, match=r"a\.ckpt cannot be read"):
        checkpoint_io.require_data(FSDPStrategy(), file)
    checkpoint_io.require_data(ModelParallelStrategy(1, 1), file)
    assert not (tmp_path / "executed").exists()
