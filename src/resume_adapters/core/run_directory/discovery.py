"""Which ranks share a run directory, where each node has its own; and which run it is.

What is kept of a run outside of its directory is found by its identity: one text for all starts of a run directory, on
all nodes. Where the directory is removed and made again,
copied or moved, the run is another one.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from resume_adapters.core.checkpoint.layout import CONTROL
from resume_adapters.core.checkpoint.remove import REMOVED
from resume_adapters.core.log import logger
from resume_adapters.core.ranks import Ranks, run_on_all_ranks
from resume_adapters.core.run_directory.upkeep import usable
from resume_adapters.core.storage.base import Storage, write_atomically
from resume_adapters.core.storage.groups import StorageGroup, shared_by_all, shared_by_some
from resume_adapters.errors import UnsupportedSetting

T = TypeVar("T")


def discover_groups(storage: Storage, ranks: Ranks, directory: Path, *, is_node_local: bool) -> StorageGroup:
    """Return the ranks that share the run directory of this rank: all, or those of its node. Every rank calls it.

    Each rank writes a probe file, and looks which probes it sees.

    Args:
        storage: the file operations.
        ranks: the ranks of the run.
        directory: the run directory; created if it is missing.
        is_node_local: see :class:`~resume_adapters.core.run.context.RunOptions`.

    Raises:
        RunDirectoryUnusable: the directory cannot be written.
        UnsupportedSetting: the ranks of one node do not share it; or nodes do, and the framework was told otherwise.
    """
    if ranks.world_size == 1:
        return shared_by_all(ranks)
    seen, local_ranks = ranks_by_directory(storage, ranks, directory), ranks.gather(ranks.local_rank)
    are_together = all(len(members) == ranks.world_size for members in seen)
    if not are_together or is_node_local:
        _require_nodes(directory, seen, local_ranks)
    if are_together:
        return shared_by_all(ranks)
    if ranks.rank == 0:
        logger.info("each node has a run directory of its own: %s is not on storage that they share.", directory)
    return shared_by_some(ranks, seen, shares=not is_node_local)


def ranks_by_directory(storage: Storage, ranks: Ranks, directory: Path) -> list[tuple[int, ...]]:
    """Return for each rank the ranks that share its directory of this path. Every rank calls it.

    Raises:
        RunDirectoryUnusable: the directory cannot be written.
    """
    if all(_probe(storage, ranks, directory, of=[0])):  # one file, however many ranks there are
        return [tuple(range(ranks.world_size))] * ranks.world_size
    return _probe(storage, ranks, directory, of=range(ranks.world_size))


def _probe(storage: Storage, ranks: Ranks, directory: Path, of: Sequence[int]) -> list[tuple[int, ...]]:
    """Return for each rank those of some ranks whose files in the directory it sees."""
    token = ranks.gather(uuid.uuid4().hex)[0]
    # The next start removes what a crash leaves under such names.
    probes = {rank: directory / CONTROL / f"{REMOVED}{token}-probe-{rank}" for rank in of}
    mine = [probe for rank, probe in probes.items() if rank == ranks.rank]

    def leave() -> None:
        for probe in mine:
            storage.make_directory(probe.parent)
            storage.write(probe, b"which ranks see this?\n")

    def look() -> tuple[int, ...]:
        return tuple(rank for rank, probe in probes.items() if storage.exists(probe))

    def take_away() -> None:
        for probe in mine:
            storage.remove_file(probe)

    def on_all(work: Callable[[], T], doing: str) -> list[T]:
        return run_on_all_ranks(ranks, usable(directory)(work), f"{doing} {directory}")

    on_all(leave, "write into")
    seen = on_all(look, "look into")
    on_all(take_away, "write into")
    return seen


def _require_nodes(directory: Path, seen: Sequence[tuple[int, ...]], local_ranks: Sequence[int]) -> None:
    """Check that the ranks that see the same directory are those of one node.

    Raises:
        UnsupportedSetting: they are not.
    """
    for members in seen:
        local = [local_ranks[rank] for rank in members]
        if local.count(0) != 1 or any(seen[rank] != members for rank in members):
            raise UnsupportedSetting(
                f"{directory} belongs neither to all ranks nor to those of a node: the ranks {_words(members)} see it, "
                f"which have the local ranks {_words(local)}. Name a directory on storage that all nodes share, or on "
                "a disk of each node, the same for all its ranks; where nodes share it, leave out the framework's "
                "setting that says otherwise; where the local ranks are others, let the launcher set LOCAL_RANK",
                path=directory,
            )


def _words(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


_FILE = "identity"

_FORM = re.compile(r"[0-9a-f]{16}")


def read_identity(storage: Storage, run_directory: Path) -> str | None:
    """Return the identity of the run in a directory; ``None`` if it has none yet, or is a copy, or was moved."""
    file = run_directory / CONTROL / _FILE
    content = storage.read(file).decode(errors="replace") if storage.is_file(file) else ""
    identity, _, written = content.rstrip("\n").partition("\n")
    is_own = _FORM.fullmatch(identity) and written == str(storage.real_path(run_directory))
    return identity if is_own else None


def write_identity(storage: Storage, run_directory: Path, identity: str) -> None:
    """Give the run in a directory an identity: 16 hexadecimal digits. A no-op if it has that one."""
    if read_identity(storage, run_directory) != identity:
        content = f"{identity}\n{storage.real_path(run_directory)}\n"
        write_atomically(storage, run_directory / CONTROL / _FILE, content.encode())
