"""A copy of a committed checkpoint in a directory of this node: written through a pending checkpoint, like any save.

It is committed with the manifest of the original, once every file has the digest that the manifest says. So a kill on
the way leaves a pending checkpoint, which the next start removes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from resume_adapters.core.checkpoint import layout
from resume_adapters.core.checkpoint.commit import PendingCheckpoint
from resume_adapters.core.checkpoint.manifest import FileEntry, Manifest
from resume_adapters.core.storage.base import Bytes, write_pieces
from resume_adapters.errors import CheckpointDamaged, TierUnavailable

Read = Callable[[FileEntry], Iterator[Bytes]]
"""Yields the content of a file of the original. May raise :class:`CheckpointDamaged` and :class:`TierUnavailable`."""


def write_copy(
    pending: PendingCheckpoint, manifest: Manifest, entries: Sequence[FileEntry], read: Read, source: str
) -> None:
    """Write a copy, and commit it. All ranks of the pending checkpoint call it; the leader then completes it.

    Args:
        pending: the copy; it is not open yet.
        manifest: that of the original.
        entries: the files that this rank writes.
        read: reads one of them.
        source: where the original is, for messages.

    Raises:
        CheckpointDamaged: on all ranks: a file is not what the manifest says, and nothing is committed.
        TierUnavailable: on all ranks: a file could not be read, and nothing is committed.
        SaveFailed: a file could not be written.
    """
    pending.open()
    found = pending.write(lambda: _write_files(pending, entries, read, source))
    failure = next((each for each in found if each is not None), None)
    if failure is not None:
        pending.drop()
        kind = CheckpointDamaged if failure.is_damage else TierUnavailable
        raise kind(failure.message, path=pending.path, step=manifest.step)
    pending.reveal()
    files = [(Path(entry.path), layout.locate(pending.storage, pending.path, entry.path)) for entry in entries]
    digests = {entry.path: (entry.bytes, entry.digest) for entry in entries}
    filled = {file: digests[path.as_posix()] for path, file in files}
    pending.commit(pending.ranks, files, lambda _: manifest, lambda: filled)


class _Failure(NamedTuple):
    """Why a file of the original could not be copied."""

    message: str
    is_damage: bool


def _write_files(pending: PendingCheckpoint, entries: Sequence[FileEntry], read: Read, source: str) -> _Failure | None:
    """Write the files of this rank; return why one of the original cannot be used, ``None`` if all can."""
    pending.require_visible()
    for entry in entries:
        target = layout.locate(pending.storage, pending.place, entry.path)
        pending.storage.make_directory(target.parent)
        try:
            found = write_pieces(pending.storage, target, read(entry))
            if found != (entry.bytes, entry.digest):  # on the way, perhaps: read it once more
                found = write_pieces(pending.storage, target, read(entry))
        except (CheckpointDamaged, TierUnavailable) as error:
            return _Failure(error.message, isinstance(error, CheckpointDamaged))
        if found != (entry.bytes, entry.digest):
            return _Failure(
                f"{source}/{entry.path} has the digest {found[1]}, its manifest says {entry.digest}: its content has "
                "changed",
                is_damage=True,
            )
    return None
