"""What one start of a run owns: its run directory, with the ranks that share it, and its tiers."""

from __future__ import annotations

from resume_adapters.core.run_directory.fencing import Fencing
from resume_adapters.core.storage.groups import StorageGroup
from resume_adapters.core.tiers.mirrors import Mirrors


class Ownership:
    """Knows whether a later start has taken the run directory, or a tier, from this one.

    Args:
        fencing: of the run directory.
        mirrors: the tiers that hold copies of the run's checkpoints.
        storage_group: the ranks that share the run directory, as far as that is known before it is opened.

    Attributes:
        storage_group: the ranks that share the run directory.
        generation: the number of this start of the run directory; 0 before it is taken over.
    """

    def __init__(self, fencing: Fencing, mirrors: Mirrors, storage_group: StorageGroup) -> None:
        self.storage_group = storage_group
        self.generation = 0
        self._fencing = fencing
        self._mirrors = mirrors

    def begin(self, storage_group: StorageGroup, generation: int) -> None:
        """Own the run directory, which has been taken over."""
        self.storage_group, self.generation = storage_group, generation

    def require(self) -> None:
        """Check on a rank that leads the run directory that no later start has taken it over, nor a tier.

        Raises:
            FencedOff: a later start has.
        """
        self._fencing.require_owned(self.generation)
        self._mirrors.require_owned()

    def require_on_node(self) -> None:
        """Check it on a rank that leads a node, and perhaps not the run directory.

        Raises:
            FencedOff: a later start has taken it over.
        """
        if self.storage_group.is_leader or not self.generation:
            self.require()
        else:
            self._fencing.require_latest(self.generation)
