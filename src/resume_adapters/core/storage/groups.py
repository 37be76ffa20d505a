"""Which ranks share a run directory: all ranks of a run, or those of one node where each node has its own disk.

Work done once per directory (preparing it, the manifest, ``latest``, pruning, the status) is done by its leader rank.
Decisions made once per run are made by rank zero, which is always a leader.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from resume_adapters.core.ranks import SINGLE_PROCESS, Ranks


@dataclass(frozen=True)
class StorageGroup:
    """The ranks that share the run directory of this rank.

    Attributes:
        rank: this rank.
        members: the ranks that share this directory, in ascending order. The first is the leader.
        leaders: the leaders of all groups of the run; only leaders may use this channel.
        shares: the leaders send each other the files that one of them lacks, so that each directory has all of them.
    """

    rank: int
    members: tuple[int, ...]
    leaders: Ranks
    shares: bool = False

    @property
    def leader(self) -> int:
        """The leader rank of this group."""
        return self.members[0]

    @property
    def is_leader(self) -> bool:
        """Whether this rank is the leader of its group."""
        return self.rank == self.leader

    @property
    def is_partial(self) -> bool:
        """Whether the run has other groups, which have directories of their own."""
        return self.leaders.world_size > 1

    @property
    def part(self) -> tuple[int, ...] | None:
        """The ranks whose files are in this directory; ``None``: those of all."""
        return self.members if self.is_partial and not self.shares else None

    def owner_in_group(self, rank: int) -> int:
        """Return the rank in this group that is responsible for a file written by ``rank``."""
        return rank if rank in self.members else self.members[rank % len(self.members)]

    def close(self) -> None:
        """Close the channel of the leaders."""
        self.leaders.close()


def shared_by_some(ranks: Ranks, seen: Sequence[tuple[int, ...]], *, shares: bool = True) -> StorageGroup:
    """Return the group of this rank, of the ranks that share a directory. Every rank calls it.

    Args:
        ranks: the ranks of the run.
        seen: for each rank those that share its directory.
        shares: each directory gets the files of all ranks.
    """
    leaders = ranks.subset(sorted({members[0] for members in seen}))
    return StorageGroup(ranks.rank, seen[ranks.rank], leaders, shares)


def shared_by_all(ranks: Ranks) -> StorageGroup:
    """Return the group of a run whose ranks all share one run directory."""
    return StorageGroup(ranks.rank, tuple(range(ranks.world_size)), SINGLE_PROCESS)
