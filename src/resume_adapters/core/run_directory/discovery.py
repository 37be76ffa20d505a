"""Which ranks share a run directory, where each node has its own; and which run it is.

What is kept of a run outside of its directory is found by its identity: one text for all starts of a run directory, on
all nodes. Where the directory is removed and made again,
copied or moved, the run is another one.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from pathlib import Path

from resume_adapters.core.checkpoint.layout import CONTROL
from resume_adapters.core.checkpoint.remove import REMOVED
from resume_adapters.core.ranks import Ranks, run_on_all_ranks
from resume_adapters.core.run_directory.upkeep import usable
from resume_adapters.core.storage.base import Storage, write_atomically
from resume_adapters.core.storage.groups import StorageGroup, shared_by_some
from resume_adapters.errors import UnsupportedSetting


def discover_groups(storage: Storage, ranks: Ranks, directory: Path, local_rank: int) -> StorageGroup:
    """Return the ranks that share the run directory of this rank, where each node has its own. Every rank calls it.

    Each rank writes a probe file, and looks which probes it sees; what the launcher says about nodes is not used.

    Args:
        storage: the file operations.
        ranks: the ranks of the run.
        directory: the run directory; created if it is missing.
        local_rank: this rank on its node.

    Raises:
        RunDirectoryUnusable: the directory cannot be written.
        UnsupportedSetting: nodes share it, or the ranks of one node do not.
    """
    seen = ranks_by_directory(storage, ranks, directory)
    _require_nodes(directory, seen, ranks.gather(local_rank))
    return shared_by_some(ranks, seen)


def ranks_by_directory(storage: Storage, ranks: Ranks, directory: Path) -> list[tuple[int, ...]]:
    """Return for each rank the ranks that share its directory of this path. Every rank calls it.

    Raises:
        RunDirectoryUnusable: the directory cannot be written.
    """
    token = ranks.gather(uuid.uuid4().hex)[0]
    # The next start removes what a crash leaves under such names.
    probes = [directory / CONTROL / f"{REMOVED}{token}-probe-{rank}" for rank in range(ranks.world_size)]
    mine = probes[ranks.rank]

    def leave() -> None:
        with usable(directory):
            storage.make_directory(mine.parent)
            storage.write(mine, b"which ranks see this?\n")

    def look() -> tuple[int, ...]:
        with usable(directory):
            return tuple(rank for rank, probe in enumerate(probes) if storage.exists(probe))

    def take_away() -> None:
        with usable(directory):
            storage.remove_file(mine)

    run_on_all_ranks(ranks, leave, f"write into {directory}")
    seen = run_on_all_ranks(ranks, look, f"look into {directory}")
    run_on_all_ranks(ranks, take_away, f"write into {directory}")
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
                f"{directory} is configured as local to each node, but the ranks {_words(members)} see it, which have "
                f"the local ranks {_words(local)}; expected the ranks of one node. Name a directory on a disk of the "
                "node, the same for all its ranks; where nodes share it, leave out the setting that says otherwise",
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
