"""The files of a checkpoint, written by all ranks together: the framework's own, and what this package adds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from resume_adapters.core import place, state
from resume_adapters.core.commit import PendingCheckpoint
from resume_adapters.core.state import EncodedParts, Stateful


class Written(NamedTuple):
    """What was written.

    Attributes:
        files: those that this rank answers for, each after its path for the manifest.
        facts: fields of the manifest.
    """

    files: list[tuple[Path, Path]]
    facts: dict[str, Any]


def write(
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
    encoded, described, files = EncodedParts(), dict[str, Any](), list[tuple[Path, Path]]()

    def write_alone() -> tuple[dict[str, str], float]:
        native()
        state.write_part(storage, pending.directory, state.rank_file("", rank), own())
        return encoded.encode({part: stateful.state_dict() for part, stateful in parts.items()}), clock()

    def write_together() -> None:
        digests = [of_rank for of_rank, _ in written]
        encoded.write(storage, pending.directory, rank, digests, sharing.leader)
        described.update(facts())
        # Listed now: what a callback adds to the directory later is not part of the checkpoint.
        files.extend((path, file) for path, file in place.files(pending.path) if answers_for(path))

    def answers_for(path: Path) -> bool:
        wrote = state.rank_of(path) if path.parts[0] == state.DIRECTORY else owner(path)
        return sharing.answering(wrote) == rank

    # Asked of all before any writes: the framework's own save may wait for a rank that has given up.
    pending.write(pending.require_visible)
    written = pending.write(write_alone)
    pending.write(write_together)
    return Written(files, {"written": written[0][1], **described})
