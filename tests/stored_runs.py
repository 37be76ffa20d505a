"""Copies of the stored run directories, changed in one place."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file, save_file

from resume_adapters.core.checkpoint import layout
from resume_adapters.core.checkpoint.contents import Contents, Located
from resume_adapters.core.checkpoint.manifest import FileEntry, encode_manifest
from resume_adapters.core.checkpoint.validity import read_manifest
from resume_adapters.core.storage.local import LocalStorage

STORAGE = LocalStorage()
STORED = Path(__file__).parent / "stored"
CHECKPOINTS = {
    "hf": "hf/out/checkpoint-15",
    "lightning": "lightning/out/last.ckpt",
    "accelerate": "accelerate/project/checkpoints/checkpoint_15",
    "deepspeed": "deepspeed/out/global_step15",
}


def copy(adapter: str, target: Path) -> Path:
    """Copy the run directory of an adapter; return the checkpoint in the copy."""
    checkpoint = STORED / CHECKPOINTS[adapter]
    shutil.copytree(checkpoint.parent, target, symlinks=True)
    return target / checkpoint.name


def contents(checkpoint: Path, *, manifest: bool = True) -> Contents:
    return Contents(STORAGE, checkpoint, read_manifest(STORAGE, checkpoint) if manifest else None)


def recommit(checkpoint: Path, **facts: object) -> None:
    """Make the manifest agree with the files as they are now."""
    manifest = read_manifest(STORAGE, checkpoint)
    found = [(path.as_posix(), *STORAGE.digest(file)) for path, file in layout.files(STORAGE, checkpoint)]
    entries = tuple(FileEntry(*each) for each in sorted(found))
    document = encode_manifest(msgspec.structs.replace(manifest, files=entries, **facts))
    layout.manifest_path(STORAGE, checkpoint).write_bytes(document)


def change_tensor(checkpoint: Path, located: Located) -> None:
    """Flip a bit of the first element of a tensor, and make the manifest agree."""
    before = contents(checkpoint)
    file = before.files[located.file.replace(".json", ".safetensors")]
    if file.suffix == ".safetensors":
        tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
        flip(tensors[located.value.key])
        save_file(tensors, file)
    elif file.name.endswith("_optim_states.pt"):  # only with DeepSpeed could it be saved again
        old = torch.cat([piece.clone() for piece in before.pieces(located)])
        new = flip(old.clone())
        content = file.read_bytes()
        assert content.count(old.numpy().tobytes()) == 1
        file.write_bytes(content.replace(old.numpy().tobytes(), new.numpy().tobytes()))
    else:
        tree = torch.load(file, weights_only=True)
        tensor = tree
        for key in located.value.key:
            tensor = tensor[key]
        flip(tensor)
        torch.save(tree, file)
    recommit(checkpoint)


def flip(tensor: torch.Tensor) -> torch.Tensor:
    """Flip a bit of the first element."""
    tensor.view(-1).view(torch.uint8)[0] ^= 1
    return tensor
