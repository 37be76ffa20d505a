"""Which files of a checkpoint are read for the Trainer."""

from __future__ import annotations

import json
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from resume_adapters.core.checkpoint.files import CheckpointFiles
from resume_adapters.core.checkpoint.manifest import FileEntry, Manifest
from resume_adapters.core.storage.local import LocalStorage
from resume_adapters.errors import CheckpointDamaged, NotRestored
from resume_adapters.hf import files


def of(checkpoint: Path) -> CheckpointFiles:
    """Return the files of a checkpoint as it is committed now."""
    entries = tuple(FileEntry(file.name, 0, "") for file in checkpoint.iterdir())
    facts = {"step": 1, "epoch": 0.0, "world_size": 1, "generation": 1, "written": 0.0, "reason": ""}
    return CheckpointFiles(LocalStorage(), checkpoint, Manifest(files=entries, **facts))


def test_whole_weights_beside_listed_shards_are_not_taken(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2)}, tmp_path / "model-1.safetensors")
    index = {"weight_map": {"weight": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    committed = of(tmp_path)
    save_file({"weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert files.weights(committed) == [tmp_path / "model-1.safetensors"]
    files.require_named(committed, with_adapters=False)


@pytest.mark.parametrize("name", ["scaler.pt", "adapter_model.safetensors"])
def test_what_the_trainer_would_load_by_its_name_is_refused(tmp_path: Path, name: str) -> None:
    committed = of(tmp_path)
    (tmp_path / "README.md").touch()
    files.require_named(committed, with_adapters=True)
    (tmp_path / name).touch()
    with pytest.raises(CheckpointDamaged, match=f"{name} that is not in its manifest"):
        files.require_named(committed, with_adapters=True)


def test_what_was_read_is_loaded_as_copies_and_all_else_from_its_file(tmp_path: Path) -> None:
    torch.save({"state": torch.zeros(4)}, tmp_path / "optimizer.pt")
    torch.save({"last_epoch": 3}, tmp_path / "scheduler.pt")
    torch.save({"state": torch.ones(4)}, tmp_path / "other.pt")
    read = files.read(of(tmp_path))
    with files.loading(read):
        loaded = torch.load(str(tmp_path / "optimizer.pt"), map_location="cpu", weights_only=True)
        loaded["state"].add_(1)
        assert torch.load(tmp_path / "scheduler.pt", weights_only=True) == {"last_epoch": 3}
        assert torch.load(tmp_path / "other.pt", map_location="cpu", weights_only=True)["state"].sum() == 4
        assert torch.load(tmp_path / "optimizer.pt", map_location="meta", weights_only=True)["state"].is_meta
    assert not read[str(tmp_path / "optimizer.pt")]["state"].any()


class Uncopied:
    """Moments of a tensor class that has no ``clone``, as torchao's have none."""

    def __deepcopy__(self, memo: object) -> object:
        raise NotImplementedError


def test_what_cannot_be_copied_is_read_again(tmp_path: Path) -> None:
    torch.save({"state": torch.ones(4)}, tmp_path / "optimizer.pt")
    with files.loading({str(tmp_path / "optimizer.pt"): {"state": Uncopied()}}):
        loaded = torch.load(str(tmp_path / "optimizer.pt"), map_location="cpu", weights_only=True)
    assert loaded["state"].sum() == 4


def test_what_is_loaded_once_more_is_no_part_of_what_proves_it(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    read = files.read(of(tmp_path))
    accelerator = types.SimpleNamespace(scaler=None)
    trainer = types.SimpleNamespace(optimizer=optimizer, lr_scheduler=None, accelerator=accelerator)
    optimizer.step()
    files.load(trainer, read)
    files.verify(trainer, read)
    optimizer.step()
    with pytest.raises(NotRestored):
        files.verify(trainer, read)
