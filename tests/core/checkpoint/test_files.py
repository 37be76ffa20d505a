"""Only the files of the manifest are read, whatever else lies in a checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from resume_adapters.core.checkpoint.checkpoint import Checkpoint
from resume_adapters.core.checkpoint.files import CheckpointFiles, extra_in_words
from resume_adapters.core.checkpoint.manifest import FileEntry, Manifest
from resume_adapters.core.checkpoint.native_files import weight_shards
from resume_adapters.core.checkpoint.validity import read_manifest
from resume_adapters.core.session.messages import log_extra
from resume_adapters.core.storage.local import LocalStorage
from resume_adapters.errors import CheckpointDamaged

from miniature import Miniature

STORAGE = LocalStorage()


def test_a_copy_of_another_rank_that_no_manifest_names_is_not_read(tmp_path: Path, shape: Any) -> None:
    job = Miniature(tmp_path)
    job.commit(10)
    resumed = Miniature(tmp_path)
    chosen = resumed.choice.checkpoint
    assert chosen is not None
    directory = resumed.run.reader(chosen).files.require("resume/ema.json").parent
    for suffix in ("json", "safetensors"):
        shutil.copy(directory / f"ema.{suffix}", directory / f"ema.rank-00000.{suffix}")
    (directory / "ema.rank-00000.json").write_text('{"step":99}')
    assert resumed.read(chosen) == "state at 10"
    extra = resumed.run.reader(chosen).files.extra()
    assert extra == ["resume/ema.rank-00000.json", "resume/ema.rank-00000.safetensors"]


def test_a_start_names_what_the_manifest_does_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Miniature(tmp_path).commit(10)
    checkpoint = tmp_path / "checkpoint-10"
    (checkpoint / "model.safetensors").write_bytes(b"other weights")
    (checkpoint / "link").symlink_to("/dev/zero")
    (checkpoint / "resume" / "odd\udcff").touch()
    files = CheckpointFiles(STORAGE, checkpoint, read_manifest(STORAGE, checkpoint))
    with caplog.at_level("WARNING", "resume_adapters"):
        log_extra("checkpoint-10", files.extra())
        log_extra("checkpoint-10", [])
    (line,) = [each for each in caplog.messages if "manifest" in each]
    assert line == "link, model.safetensors, resume/odd\\udcff: not in the manifest of checkpoint-10, and not read."
    assert extra_in_words([str(number) for number in range(7)]) == "0, 1, 2, 3, 4 and 2 more"
    assert files.find("model.safetensors") is None
    with pytest.raises(CheckpointDamaged, match=r"checkpoint-10 has no file model\.safetensors"):
        files.read("model.safetensors")
    (checkpoint / "model.bin").unlink()
    with pytest.raises(CheckpointDamaged, match=r"model\.bin cannot be read: No such file"):
        files.read("model.bin")


def sharded(directory: Path, *shards: str) -> CheckpointFiles:
    """Write an index of sharded weights, and return the files of a foreign checkpoint."""
    directory.mkdir(exist_ok=True)
    index = {"weight_map": {str(number): shard for number, shard in enumerate(shards)}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return CheckpointFiles(STORAGE, directory, None)


def test_an_index_that_points_out_of_the_checkpoint_is_refused(tmp_path: Path) -> None:
    outside = tmp_path / "outside.safetensors"
    save_file({"weight": torch.zeros(2)}, outside)
    checkpoint = tmp_path / "checkpoint-10"
    files = sharded(checkpoint, "b.safetensors", "a.safetensors")
    for name in "ab":
        save_file({"weight": torch.ones(2)}, checkpoint / f"{name}.safetensors")
    index = "model.safetensors.index.json"
    assert weight_shards(files, index) == [checkpoint / "a.safetensors", checkpoint / "b.safetensors"]
    assert files.extra() == []
    (checkpoint / "link.safetensors").symlink_to(outside)
    for shard in ("../outside.safetensors", str(outside)):
        with pytest.raises(CheckpointDamaged, match=r"names .*outside\.safetensors', which is outside the checkpoint"):
            weight_shards(sharded(checkpoint, shard), index)
    for shard in ("link.safetensors", "gone.safetensors"):
        with pytest.raises(CheckpointDamaged, match=f"names {shard}, which is not in checkpoint-10"):
            weight_shards(sharded(checkpoint, shard), index)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map":3}', "[" * 100_000, '{"weight_map":{"a":[1]}}'])
def test_an_index_that_is_none_is_damaged(tmp_path: Path, content: str) -> None:
    files = sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointDamaged):
        weight_shards(files, "model.safetensors.index.json")


def test_a_foreign_checkpoint_has_the_parts_that_lie_in_it(tmp_path: Path) -> None:
    job = Miniature(tmp_path / "run")
    assert job.run.reader(Checkpoint(tmp_path, 10, None)).part("ema") is None


def test_a_file_of_a_framework_alone_is_its_own_content(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").write_bytes(b"weights")
    files = CheckpointFiles(LocalStorage(), tmp_path / "last.ckpt", None)
    assert files.with_name("last.ckpt") == ["last.ckpt"] and not files.with_name(".metadata")


def test_files_of_a_name_are_those_of_the_manifest_or_of_the_disk(tmp_path: Path) -> None:
    """A checkpoint of the bare framework has no manifest."""
    for folder in ("a", "b"):
        (tmp_path / "checkpoint-1" / folder).mkdir(parents=True)
        (tmp_path / "checkpoint-1" / folder / "model.bin").write_text("x")
    entry = FileEntry(path="a/model.bin", bytes=1, digest="0")
    manifest = Manifest(step=1, epoch=0.0, world_size=1, generation=1, written=0.0, reason="", files=(entry,))
    of_manifest = CheckpointFiles(LocalStorage(), tmp_path / "checkpoint-1", manifest)
    of_disk = CheckpointFiles(LocalStorage(), tmp_path / "checkpoint-1", None)
    assert of_manifest.with_name("model.bin") == ["a/model.bin"]
    assert of_disk.with_name("model.bin") == ["a/model.bin", "b/model.bin"]
