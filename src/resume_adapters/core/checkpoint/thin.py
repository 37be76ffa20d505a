"""Leave the weights of a committed checkpoint, and drop all else: it is saved again under its name, with fewer files.

That is a commit like any other. A kill before it leaves the whole checkpoint, which a start restores to its name; a
kill after it leaves the one of weights alone, and beside it the other, which the next prune removes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from resume_adapters.core.checkpoint.commit import PendingCheckpoint
from resume_adapters.core.checkpoint.layout import EXTRAS, locator
from resume_adapters.core.checkpoint.manifest import FORMAT, FileEntry, Manifest
from resume_adapters.core.checkpoint.native_files import copy_keys
from resume_adapters.core.checkpoint.validity import check_digests, read_manifest
from resume_adapters.core.ranks import SINGLE_PROCESS
from resume_adapters.core.storage.base import read_pieces, write_pieces
from resume_adapters.errors import CheckpointDamaged


@dataclass(frozen=True)
class WeightsFiles:
    """Where a framework's checkpoints hold the weights.

    What is not known to be needed by a resume alone stays: nobody can tell whether it is precious.

    Attributes:
        only_resumed: matches the paths in a checkpoint of the files that only a resume reads.
        is_kept: the files are of ``torch.save``, and this returns whether what they have under a key stays; ``None``:
            files are copied as they are.
    """

    only_resumed: re.Pattern[str] = re.compile("(?!)")
    is_kept: Callable[[str], bool] | None = None


def drop_state(pending: PendingCheckpoint, weights: WeightsFiles) -> None:
    """Replace a committed checkpoint by one of its weights alone; the former one is superseded by it.

    Args:
        pending: the new one, of this process alone. It is not open yet, and has the path of the former.
        weights: where these are.

    Raises:
        CheckpointDamaged: a file is not as the manifest says; the checkpoint stays as it is, as with all that follow.
        NotSerialisable: what is to stay in a file is not data.
        SaveFailed: a file could not be written.
        FencedOff: a later start owns the run directory.
    """
    storage, source = pending.storage, pending.path
    manifest = read_manifest(storage, source)
    kept = [each for each in manifest.files if not _is_dropped(each.path, weights)]

    def write() -> None:
        from_here, to_there = locator(storage, source), locator(storage, pending.place)
        for entry in kept:
            file, target = from_here(entry.path), to_there(entry.path)
            storage.make_directory(target.parent)
            if weights.is_kept is not None:
                check_digests(storage, source, [entry])
                copy_keys(file, target, weights.is_kept)
            elif write_pieces(storage, target, read_pieces(storage, file)) != (entry.bytes, entry.digest):
                raise CheckpointDamaged(f"{entry.path} has changed since it was committed", path=source)

    def describe(entries: tuple[FileEntry, ...]) -> Manifest:
        parts = tuple(each for each in manifest.parts if each.name == "model")
        return replace(manifest, format=FORMAT, files=entries, parts=parts, weights_only=True)

    try:
        pending.open()
        pending.write(write)
        to_there = locator(storage, pending.place)
        pending.commit(SINGLE_PROCESS, [(Path(each.path), to_there(each.path)) for each in kept], describe)
        pending.complete()
    finally:
        pending.release()


def _is_dropped(path: str, weights: WeightsFiles) -> bool:
    return path.startswith(f"{EXTRAS}/") or weights.only_resumed.fullmatch(path) is not None
