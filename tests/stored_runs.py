"""Copies of the stored run directories, changed in one place."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec

from resume_adapters.core.checkpoint import layout
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


def recommit(checkpoint: Path, **facts: object) -> None:
    """Make the manifest agree with the files as they are now."""
    manifest = read_manifest(STORAGE, checkpoint)
    found = [(path.as_posix(), *STORAGE.digest(file)) for path, file in layout.files(STORAGE, checkpoint)]
    entries = tuple(FileEntry(*each) for each in sorted(found))
    document = encode_manifest(msgspec.structs.replace(manifest, files=entries, **facts))
    layout.manifest_path(STORAGE, checkpoint).write_bytes(document)
