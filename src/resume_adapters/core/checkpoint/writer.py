"""The files of a checkpoint, written by all ranks together: the framework's own, and what this package adds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from resume_adapters.core.checkpoint import layout
from resume_adapters.core.checkpoint.commit import PendingCheckpoint
from resume_adapters.core.checkpoint.layout import EXTRAS, rank_file, rank_of
from resume_adapters.core.checkpoint.parts import PartsWriter, write_part
from resume_adapters.core.state.stateful import Stateful


class Written(NamedTuple):
    """What was written.

    Attributes:
        files: those that this rank answers for, each after its path for the manifest.
        facts: fields of the manifest.
    """

    files: list[tuple[Path, Path]]
    facts: dict[str, Any]


def write_checkpoint(
    pending: PendingCheckpoint,
    *,
    native: Callable[[], object],
    own: Callable[[], Any],
    parts: Mapping[str, Stateful],
    owner: Callable[[Path], int],
    facts: Callable[[], dict[str, Any]],
    clock: Callable[[], float],
) -> Written:
    """Write a pending checkpoint; see :meth:`ResumableRun.save`. Every rank calls it.

    Raises:
        SaveFailed: this rank could not write; nothing is committed.
        PeerFailed: another rank could not.
    """
    storage, sharing, rank = pending.storage, pending.sharing, pending.ranks.rank
    encoded, described, files = PartsWriter(), dict[str, Any](), list[tuple[Path, Path]]()

    def write_alone() -> tuple[dict[str, str], float]:
        native()
        write_part(storage, pending.directory, rank_file("", rank), own())
        return encoded.encode({part: stateful.state_dict() for part, stateful in parts.items()}), clock()

    def write_together() -> None:
        digests = [of_rank for of_rank, _ in written]
        encoded.write(storage, pending.directory, rank, digests, sharing.leader)
        described.update(facts())
        # Listed now: what a callback adds to the directory later is not part of the checkpoint.
        files.extend((path, file) for path, file in layout.files(pending.path) if answers_for(path))

    def answers_for(path: Path) -> bool:
        wrote = rank_of(path) if path.parts[0] == EXTRAS else owner(path)
        return sharing.answering(wrote) == rank

    # Asked of all before any writes: the framework's own save may wait for a rank that has given up.
    pending.write(pending.require_visible)
    written = pending.write(write_alone)
    pending.write(write_together)
    return Written(files, {"written": written[0][1], **described})
