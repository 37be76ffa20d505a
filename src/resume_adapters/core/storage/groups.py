"""Which ranks share a run directory: all of a run, or those of one node where each node has a disk of its own.

What is done once for a directory (making room for a checkpoint, its manifest, ``latest``, pruning, the status) is done
by the rank that leads it. What is decided once for a run is decided by rank zero, which always leads its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from resume_adapters.core.ranks import SINGLE_PROCESS, Ranks


@dataclass(frozen=True)
class StorageGroup:
    """The ranks that share the run directory of this one.

    Attributes:
        rank: this rank.
        members: the ranks that see this directory, in ascending order. The first leads it.
        leaders: those who lead a directory, among themselves; for leaders to use.
    """

    rank: int
    members: tuple[int, ...]
    leaders: Ranks

    @property
    def leader(self) -> int:
        """The rank that leads this directory."""
        return self.members[0]

    @property
    def leads(self) -> bool:
        """Whether this rank leads its directory."""
        return self.rank == self.leader

    @property
    def is_partial(self) -> bool:
        """Whether other ranks have other directories, so that this one holds a part of each checkpoint."""
        return self.leaders.world_size > 1

    def answering(self, rank: int) -> int:
        """Return who answers here for a file of some rank: that rank, or for one that is not here a member."""
        return rank if rank in self.members else self.members[rank % len(self.members)]


def shared_by_all(ranks: Ranks) -> StorageGroup:
    """Return that all ranks share one run directory."""
    return StorageGroup(ranks.rank, tuple(range(ranks.world_size)), SINGLE_PROCESS)
