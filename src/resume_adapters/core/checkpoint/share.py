"""Give each part of a pending checkpoint the files of the others, where the ranks of each node see only their own part.

A framework lets one rank write what all of them read. The leaders of the nodes send each other what one of them lacks,
piece by piece, over the channel that they have.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import xxhash

from resume_adapters.core.checkpoint import layout
from resume_adapters.core.checkpoint.commit import PendingCheckpoint
from resume_adapters.core.ranks import Ranks
from resume_adapters.core.storage.base import Storage, read_pieces, write_pieces


def share_files(pending: PendingCheckpoint) -> None:
    """Let every node have all files that any rank has written. Every rank calls it, before :meth:`reveal`.

    What several nodes have under one name stays as it is on each of them.

    Raises:
        SaveFailed: a file could not be read or written here.
        PeerFailed: one could not on another rank.
    """
    if pending.storage_group.is_partial:
        pending.write(functools.partial(_share, pending))


def _share(pending: PendingCheckpoint) -> None:
    if not pending.storage_group.is_leader:
        return
    storage, channel = pending.storage, pending.storage_group.leaders
    held = channel.gather({path.as_posix() for path, _ in layout.files(storage, pending.place)})
    problem: OSError | None = None
    for path in sorted(set().union(*held)):
        sender = next(node for node, files in enumerate(held) if path in files)
        if all(path in files for files in held):
            continue
        file = layout.locate(storage, pending.place, path)
        try:
            _send(storage, channel, file, sender, is_held=path in held[channel.rank])
        except OSError as error:  # the others go on to the next file, too
            problem = problem or error
    if problem is not None:
        raise problem


def _send(storage: Storage, channel: Ranks, file: Path, sender: int, *, is_held: bool) -> None:
    """Let the nodes that lack a file have it; all leaders call it, and none leaves before the others.

    Raises:
        OSError: it could not be read or written, or came as something else.
    """
    sent = _Sent(channel, sender, read_pieces(storage, file) if channel.rank == sender else None)
    pieces = iter(sent)
    try:
        if not is_held:
            storage.make_directory(file.parent)
            found = write_pieces(storage, file, pieces)
            if found != sent.digest:
                raise OSError(f"{file} came over as {found}, and was sent as {sent.digest}")
    finally:
        for _ in pieces:
            """The others still write it."""


class _Sent:
    """A file on its way: its pieces, one after the other, on all leaders at once.

    Args:
        channel: that of the leaders.
        sender: who has it.
        pieces: its content; ``None`` on the others.

    Attributes:
        digest: size and XXH3-128 digest of what was sent; known at the end.
    """

    def __init__(self, channel: Ranks, sender: int, pieces: Iterator[bytes] | None) -> None:
        self.digest: tuple[int, str] | None = None
        self._channel = channel
        self._sender = sender
        self._pieces = pieces
        self._hasher = xxhash.xxh3_128()
        self._bytes = 0

    def __iter__(self) -> Iterator[bytes]:
        while True:
            piece = self._channel.broadcast(self._next(), self._sender)
            if isinstance(piece, str):
                raise OSError(piece)
            if isinstance(piece, tuple):
                self.digest = piece
                return
            yield piece

    def _next(self) -> bytes | tuple[int, str] | str:
        """Return the next piece; at the end what was sent; or why it could not be read."""
        if self._pieces is None:
            return ""
        try:
            piece = next(self._pieces, None)
        except OSError as error:
            return f"the sender could not read it: {error}"
        if piece is None:
            return self._bytes, self._hasher.hexdigest()
        self._hasher.update(piece)
        self._bytes += len(piece)
        return piece
