"""What all ranks write into a pending checkpoint: the framework's own files, and what this package adds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from resume_adapters.core.checkpoint import layout
from resume_adapters.core.checkpoint.commit import PendingCheckpoint
from resume_adapters.core.checkpoint.layout import EXTRAS, rank_file, rank_of
from resume_adapters.core.checkpoint.parts import PartsWriter, write_part
from resume_adapters.core.state import encoding
from resume_adapters.core.state.stateful import Stateful

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
        """Let the framework write its own files."""

    def capture(self) -> Captured:
        """Return what is added to them; after :meth:`save`, which may draw random numbers."""

    def owner_of(self, file: Path, /) -> int:
        """Return the rank that wrote a file of the framework, by its path in the checkpoint; called for each file."""


class CallContent(NamedTuple):
    """What a checkpoint of a training call is to hold; see :class:`CheckpointContent`."""

    save: Callable[[Path], object]
    capture: Callable[[], Captured]
    owner_of: Callable[[Path], int]


class Copied(Protocol):
    """What is copied of a save, and written later."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is."""


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
    copying: Callable[[Path], AbstractContextManager[Copied | None]] | None = None,
    share: Callable[[PendingCheckpoint], object] = bool,
) -> WrittenCheckpoint:
    """Begin and write a checkpoint; every rank calls it. It gets its name, unless a rank still has files to write.

    Args:
        pending: the checkpoint.
        content: what it is to hold.
        clock: returns seconds since 1970.
        copying: returns the context in which the framework writes into a path, and which has what is copied of that;
            ``None``: the framework writes its files.
        share: called when all ranks have written, before the checkpoint has its name.

    Raises:
        SaveFailed: this rank could not write; nothing is committed.
        PeerFailed: another rank could not.
        FencedOff: a later start owns the run directory.
    """
    storage, group, rank = pending.storage, pending.storage_group, pending.ranks.rank
    parts = PartsWriter()
    captured = Captured({}, {}, {})
    document = b""
    found = WrittenCheckpoint([], {})

    def write_alone() -> tuple[dict[str, str], float, bool]:
        nonlocal captured, document
        with nullcontext() if copying is None else copying(pending.place) as copied:
            content.save(pending.place)
        captured = content.capture()
        document = write_part(pending.write_file, pending.directory, rank_file("", rank), captured.rank_state)
        digests = parts.encode({name: part.state_dict() for name, part in captured.parts.items()})
        return digests, clock(), copied is not None and not copied.is_empty

    def write_parts() -> None:
        pending.require_owned()
        parts.write(pending.write_file, pending.directory, rank, [digests for digests, *_ in written], group.leader)

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
    share(pending)
    if not any(is_copied for *_, is_copied in written):
        pending.reveal()
    pending.write(find)
    return found
