"""What all ranks write into a pending checkpoint: the framework's own files, and what this package adds.

Where the ranks of each node see only their own part, each part may be given the files of the others: a framework lets
one rank write what all of them read. The leaders of the nodes send each other what one of them lacks, piece by piece,
over the channel that they have.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import xxhash

from resume_adapters.core.checkpoint import layout
from resume_adapters.core.checkpoint.commit import PendingCheckpoint
from resume_adapters.core.checkpoint.layout import EXTRAS, rank_file, rank_of
from resume_adapters.core.checkpoint.parts import write_part
from resume_adapters.core.ranks import Ranks
from resume_adapters.core.state import encoding
from resume_adapters.core.state.stateful import Stateful
from resume_adapters.core.storage.base import Storage, read_pieces, write_pieces

RankTree = Mapping[str, Any]
"""What one rank saves for itself, as data."""


@dataclass(frozen=True)
class Captured:
    """What a checkpoint holds beside the framework's files, as it is when that has written them.

    Attributes:
        rank_state: what belongs to this rank alone.
        parts: what may be alike on all ranks, by name.
        facts: fields of :class:`~resume_adapters.core.checkpoint.manifest.Manifest`.
        complete: returns the fields of ``rank_state`` that are known only once the framework's tensors are copied; it
            is called on the thread that commits. Where nothing is copied, there are none.
    """

    rank_state: RankTree
    parts: Mapping[str, Stateful]
    facts: Mapping[str, Any]
    complete: Callable[[], RankTree] = dict


class CheckpointContent(Protocol):
    """What a checkpoint is to hold. Its methods are called for each save, on every rank, in this order."""

    def save(self, directory: Path, /) -> object:
        """Write the framework's own files."""

    def capture(self) -> Captured:
        """Return what is added to them; after :meth:`save`, which may draw random numbers."""

    def owner_of(self, file: Path, /) -> int:
        """Return the rank that wrote a file of the framework, by its path in the checkpoint; called for each file."""


class CallContent(NamedTuple):
    """What a checkpoint of a training call is to hold; see :class:`CheckpointContent`."""

    save: Callable[[Path], object]
    capture: Callable[[], Captured]
    owner_of: Callable[[Path], int]


@dataclass(frozen=True)
class WrittenCheckpoint:
    """What was written.

    Attributes:
        files: those that this rank answers for, each after its path for the manifest.
        facts: fields of the manifest.
        complete: writes what is known only once the framework's tensors are copied.
    """

    files: list[tuple[Path, Path]]
    facts: dict[str, Any]
    complete: Callable[[], object] = bool


def write_checkpoint(
    pending: PendingCheckpoint,
    content: CheckpointContent,
    clock: Callable[[], float],
    copying: Callable[[Path], AbstractContextManager[Any]] | None = None,
) -> WrittenCheckpoint:
    """Begin and write a checkpoint; every rank calls it. It gets its name, unless a rank still has files to write.

    Args:
        pending: the checkpoint.
        content: what it is to hold.
        clock: returns seconds since 1970.
        copying: returns the context in which the framework writes into a path, and which has what is copied of that;
            ``None``: the framework writes its files.

    Raises:
        SaveFailed: this rank could not write; nothing is committed.
        PeerFailed: another rank could not.
        FencedOff: a later start owns the run directory.
    """
    storage, group, rank = pending.storage, pending.storage_group, pending.ranks.rank
    captured = Captured({}, {}, {})
    document = b""
    parts: dict[str, tuple[bytes, dict[str, Any]]] = {}
    found = WrittenCheckpoint([], {})

    def write_alone() -> tuple[dict[str, str], float, bool]:
        nonlocal captured, document
        with nullcontext() if copying is None else copying(pending.place) as copied:
            content.save(pending.place)
        captured = content.capture()
        document, tensors = encoding.encode(encoding.with_types(captured.rank_state, "what a rank saves"))
        write_part(pending.write_file, pending.directory, rank_file("", rank), document, tensors)
        for name, part in captured.parts.items():
            parts[name] = encoding.encode(encoding.with_types(part.state_dict(), name))
        digests = {name: encoding.digest(*encoded) for name, encoded in parts.items()}
        return digests, clock(), copied is not None and not copied.is_empty

    def write_parts() -> None:
        if group.is_leader:
            pending.fence()
        # What one rank writes for all of them: in this directory, or in that of each node.
        writer = 0 if group.shares else group.leader
        mine, of_writer = written[rank][0], written[writer][0]
        for name, encoded in parts.items():
            if rank == writer:
                write_part(pending.write_file, pending.directory, name, *encoded)
            elif mine[name] != of_writer.get(name):
                write_part(pending.write_file, pending.directory, rank_file(name, rank), *encoded)

    def find() -> None:
        nonlocal found
        pending.require_visible()
        facts = {"written": written[0][1], **captured.facts}
        # Listed now: what a callback adds to the directory later is not part of the checkpoint.
        files = [(path, file) for path, file in layout.files(storage, pending.place) if owner(path) == rank]
        found = WrittenCheckpoint(files, facts, complete)

    def complete() -> None:
        fields = captured.complete()
        if fields:  # the rest may have changed since
            file = pending.directory / f"{rank_file('', rank)}.json"
            pending.write_file(file, encoding.merged(document, fields))

    def owner(path: Path) -> int:
        wrote = rank_of(path) if path.parts[0] == EXTRAS else content.owner_of(path)
        return group.owner_in_group(wrote)

    pending.open()
    # Asked of all before any writes: the framework's own save may wait for a rank that has failed.
    pending.write(pending.require_visible)
    written = pending.write(write_alone)
    pending.write(write_parts)
    if group.shares:
        pending.write(functools.partial(_share, pending))
    if not any(is_copied for *_, is_copied in written):
        pending.reveal()
    pending.write(find)
    return found


def _share(pending: PendingCheckpoint) -> None:
    """Send every node the files that any rank has written; what several have under one name stays as it is."""
    if pending.storage_group.is_leader:
        mine = {path.as_posix() for path, _ in layout.files(pending.storage, pending.place)}
        send_missing(pending.storage, pending.storage_group.leaders, pending.place, mine)


def send_missing(storage: Storage, nodes: Ranks, place: Path, mine: Set[str]) -> None:
    """Send every node the files of a checkpoint that it lacks and another has. The leaders of all nodes call it.

    Args:
        storage: the file operations.
        nodes: the leaders.
        place: where the checkpoint is on this node.
        mine: the paths in the manifest of the files that this node has.

    Raises:
        OSError: one could not be read or written, or came as something else.
    """
    held = nodes.gather(set(mine))
    problem: OSError | None = None
    for path in sorted(set().union(*held)):
        sender = next(node for node, files in enumerate(held) if path in files)
        if all(path in files for files in held):
            continue
        file = layout.locate(storage, place, path)
        try:
            _send(storage, nodes, file, sender, is_held=path in mine)
        except OSError as error:  # the others go on to the next file, too
            problem = problem or error
    if problem is not None:
        raise problem


def _send(storage: Storage, channel: Ranks, file: Path, sender: int, *, is_held: bool) -> None:
    """Broadcast a file to the nodes that lack it; all leaders call it, and none leaves before the others.

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
