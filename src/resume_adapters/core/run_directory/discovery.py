"""Run directories on disks that each node has alone: which ranks see which."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path

from resume_adapters.core.checkpoint.layout import CONTROL
from resume_adapters.core.ranks import Ranks, run_on_all_ranks
from resume_adapters.core.run_directory.upkeep import usable
from resume_adapters.core.storage.base import Storage
from resume_adapters.core.storage.groups import StorageGroup
from resume_adapters.errors import UnsupportedSetting


def discover_groups(storage: Storage, ranks: Ranks, directory: Path, local_rank: int) -> StorageGroup:
    """Find out which ranks share a run directory that is each node's own. Every rank calls it.

    What a launcher says of nodes is not asked: each rank leaves a probe, and looks whose probes it sees.

    Args:
        storage: the file operations.
        ranks: the ranks of the run.
        directory: the run directory; made where it is missing.
        local_rank: this rank on its node.

    Raises:
        RunDirectoryUnusable: the directory cannot be written.
        UnsupportedSetting: nodes share it, or the ranks of a node do not.
    """
    token = ranks.gather(uuid.uuid4().hex)[0].encode()
    # By this name, the next start removes what a crash leaves.
    probes = [directory / CONTROL / f"remove-probe-{rank}" for rank in range(ranks.world_size)]
    mine = probes[ranks.rank]

    def leave() -> None:
        with usable(directory):
            storage.make_directory(mine.parent)
            storage.write(mine, token)

    def look() -> tuple[int, ...]:
        with usable(directory):
            return tuple(rank for rank, probe in enumerate(probes) if probe.exists() and storage.read(probe) == token)

    def take_away() -> None:
        with usable(directory):
            storage.remove_file(mine)

    run_on_all_ranks(ranks, leave, f"write into {directory}")
    seen = run_on_all_ranks(ranks, look, f"look into {directory}")
    run_on_all_ranks(ranks, take_away, f"write into {directory}")
    _require_nodes(directory, seen, ranks.gather(local_rank))
    leaders = ranks.among(sorted({members[0] for members in seen}))
    return StorageGroup(ranks.rank, seen[ranks.rank], leaders)


def _require_nodes(directory: Path, seen: Sequence[tuple[int, ...]], local_ranks: Sequence[int]) -> None:
    """Check that those who see the same directory are the ranks of one node.

    Raises:
        UnsupportedSetting: they are not.
    """
    for members in seen:
        local = [local_ranks[rank] for rank in members]
        if local.count(0) != 1 or any(seen[rank] != members for rank in members):
            raise UnsupportedSetting(
                f"{directory} was said to be each node's own, and is seen by the ranks {_words(members)}, whose ranks "
                f"on their nodes are {_words(local)}; expected those of one node. Name a directory on a disk of the "
                "node, the same for all its ranks; where nodes share it, leave out the setting that says otherwise",
                path=directory,
            )


def _words(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
