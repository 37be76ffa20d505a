"""Whether the files of a checkpoint are complete, as far as their formats say: for one that has no digests."""

from __future__ import annotations

import json
from pathlib import Path

from resume_adapters.cli.documents import READABLE, Damage, Verdict
from resume_adapters.cli.run_directory import STORAGE
from resume_adapters.core.checkpoint import layout
from resume_adapters.core.checkpoint.files import CheckpointFiles
from resume_adapters.core.checkpoint.native_files import require_intact, weight_shards
from resume_adapters.errors import CheckpointDamaged

_ARCHIVES = (".pt", ".pth", ".bin", ".ckpt")
_PICKLE = b"\x80"


def verify_structure(checkpoint: Path) -> Verdict:
    """Check that no file of a checkpoint is torn, and that no shard of its weights is missing."""
    files = CheckpointFiles(STORAGE, checkpoint, None)
    damage, count, total = [], 0, 0
    for name, path in layout.files(STORAGE, checkpoint):
        file = name.as_posix()
        count, total = count + 1, total + STORAGE.size(path)
        try:
            _require_structure(path)
            if file.endswith(".index.json"):
                weight_shards(files, file)
        except CheckpointDamaged as error:
            damage.append(Damage(file, str(error)))
    verdict = "damaged" if damage else READABLE if count else "foreign"
    return Verdict(checkpoint.name, verdict, count, total, tuple(damage))


def _require_structure(file: Path) -> None:
    """Check a file in a format that is known: safetensors, JSON, or an archive of torch.

    Raises:
        CheckpointDamaged: it is torn, or empty.
    """
    if file.suffix == ".json":
        try:
            json.loads(STORAGE.read(file))
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointDamaged(f"{file.name} is torn: {error}", path=file) from error
    elif file.suffix == ".safetensors" or (file.suffix in _ARCHIVES and not _is_bare_pickle(file)):
        require_intact(file)


def _is_bare_pickle(file: Path) -> bool:
    """Return whether a file is what torch wrote before 1.6, and other tools still do: nothing says where it ends."""
    with file.open("rb") as opened:
        return opened.read(1) == _PICKLE
