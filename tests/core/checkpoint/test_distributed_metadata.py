"""The index of torch's distributed checkpoints is read as data."""

from __future__ import annotations

import dataclasses
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from resume_adapters.core.checkpoint.distributed_metadata import reading
from resume_adapters.core.checkpoint.files import CheckpointFiles
from resume_adapters.core.storage.local import LocalStorage
from resume_adapters.errors import CheckpointDamaged


class Code:
    """What runs code when it is loaded freely."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def saved(directory: Path) -> CheckpointFiles:
    state = {"weight": torch.arange(6.0, dtype=torch.bfloat16), "lr": 0.1, "betas": [0.9, 0.99]}
    dcp.save(state, checkpoint_id=directory / "shards", no_dist=True)
    return CheckpointFiles(LocalStorage(), directory, None)


def test_what_torch_wrote_is_read(tmp_path: Path) -> None:
    files = saved(tmp_path)
    live = {"weight": torch.zeros(6, dtype=torch.bfloat16), "lr": 0.0, "betas": [0.0, 0.0]}
    with reading(files):
        dcp.load(live, checkpoint_id=tmp_path / "shards", no_dist=True)
    assert torch.equal(live["weight"], torch.arange(6.0, dtype=torch.bfloat16)) and live["lr"] == 0.1
    assert dcp.filesystem.pickle is pickle
    (tmp_path / "none").mkdir()
    with reading(CheckpointFiles(LocalStorage(), tmp_path / "none", None)):
        assert dcp.filesystem.pickle is pickle


@pytest.mark.parametrize("content", ["code", "torn", "empty", "other"])
def test_an_index_that_names_code_or_is_torn_is_damaged_and_nothing_runs(tmp_path: Path, content: str) -> None:
    files = saved(tmp_path)
    index = tmp_path / "shards" / ".metadata"
    whole = index.read_bytes()
    odd = {"code": pickle.dumps(Code(tmp_path / "ran")), "torn": whole[:-20], "empty": b"", "other": pickle.dumps(3)}
    index.write_bytes(odd[content])
    with pytest.raises(CheckpointDamaged, match=r"shards/\.metadata cannot be read"), reading(files):
        pass
    assert not (tmp_path / "ran").exists()


def test_torch_itself_reads_through_the_list(tmp_path: Path) -> None:
    """Also where the file changes between the check and torch's own read."""
    files = saved(tmp_path)
    live = {"weight": torch.zeros(6)}
    with pytest.raises(CheckpointDamaged, match="does not belong in an index"), reading(files):
        (tmp_path / "shards" / ".metadata").write_bytes(pickle.dumps(Code(tmp_path / "ran")))
        dcp.load(live, checkpoint_id=tmp_path / "shards", no_dist=True)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("named", ["/etc/hostname", "../../outside.distcp", "pipe", "link", "absent.distcp", 3])
def test_an_index_names_files_of_its_checkpoint_alone(tmp_path: Path, named: Any) -> None:
    """torch would read any file of the machine; and wait for ever at a pipe."""
    run = tmp_path / "run"
    files = saved(run)
    (tmp_path / "outside.distcp").write_bytes(b"of somebody")
    os.mkfifo(run / "shards" / "pipe")
    (run / "shards" / "link").symlink_to(tmp_path / "outside.distcp")
    index = run / "shards" / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    key = next(iter(metadata.storage_data))
    metadata.storage_data[key] = dataclasses.replace(metadata.storage_data[key], relative_path=named)
    index.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointDamaged, match=r"has no file|cannot be read"), reading(files):
        pass
