"""A copy of a committed checkpoint in a directory of this node: written through a pending checkpoint, like any save.

It is committed with the manifest of the original, once every file has the digest that the manifest says. So a kill on
the way leaves a pending checkpoint, which the next start removes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from resume_adapters.core.checkpoint import layout
from resume_adapters.core.checkpoint.commit import PendingCheckpoint
from resume_adapters.core.checkpoint.manifest import FileEntry, Manifest
from resume_adapters.core.storage.base import Bytes
from resume_adapters.core.tiers.pieces import write_pieces
from resume_adapters.errors import CheckpointDamaged

Read = Callable[[FileEntry], Iterator[Bytes]]
"""Yields the content of a file of the original. It may raise :class:`CheckpointDamaged`."""


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
        SaveFailed: a file could not be written.
    """
    pending.open()
    damage = pending.write(lambda: _write_files(pending, entries, read, source))
    if any(damage):
        pending.drop(pending.ranks)
        raise CheckpointDamaged(next(filter(None, damage)), path=pending.path, step=manifest.step)
    pending.reveal()
    files = [(Path(entry.path), layout.locate(pending.storage, pending.path, entry.path)) for entry in entries]
    digests = {entry.path: (entry.bytes, entry.digest) for entry in entries}
    filled = {file: digests[path.as_posix()] for path, file in files}
    pending.commit(pending.ranks, files, lambda _: manifest, lambda: filled)


def _write_files(pending: PendingCheckpoint, entries: Sequence[FileEntry], read: Read, source: str) -> str:
    """Write the files of this rank; return what is damaged in the original, empty if nothing is."""
    pending.require_visible()
    for entry in entries:
        target = layout.locate(pending.storage, pending.place, entry.path)
        pending.storage.make_directory(target.parent)
        try:
            found = write_pieces(pending.storage, target, read(entry))
            if found != (entry.bytes, entry.digest):  # on the way, perhaps: read it once more
                found = write_pieces(pending.storage, target, read(entry))
        except CheckpointDamaged as error:
            return error.message
        if found != (entry.bytes, entry.digest):
            return (
                f"{source}/{entry.path} has the digest {found[1]}, its manifest says {entry.digest}: its content has "
                "changed"
            )
    return ""
