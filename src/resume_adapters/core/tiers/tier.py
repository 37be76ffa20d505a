"""A tier: a place beyond the run directory that holds copies of committed checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from resume_adapters.core.checkpoint.manifest import FileEntry, Manifest
from resume_adapters.core.storage.base import Bytes


class Identity(NamedTuple):
    """Which save a checkpoint is: two of one name and step may be of different starts.

    They compare as a resume prefers them: the later step, and of one step what was written later.
    """

    step: int
    written: float
    generation: int
    name: str

    @classmethod
    def of(cls, name: str, manifest: Manifest) -> Identity:
        """Return the identity of a checkpoint."""
        return cls(manifest.step, manifest.written, manifest.generation, name)


@dataclass(frozen=True)
class TierCheckpoint:
    """A checkpoint that is on a tier: its manifest is there.

    Attributes:
        place: where on the tier; two saves of one name have different places.
        name: its name in the run directory.
        manifest: what it contains.
    """

    place: str
    name: str
    manifest: Manifest

    @property
    def identity(self) -> Identity:
        """Which save it is."""
        return Identity.of(self.name, self.manifest)


class Tier(Protocol):
    """What a resume may take a checkpoint from. Methods may raise :class:`~resume_adapters.errors.TierUnavailable`."""

    @property
    def label(self) -> str:
        """Where it is, for messages; without credentials."""

    def checkpoints(self) -> list[TierCheckpoint]:
        """Return the checkpoints that are there, the one that a resume prefers first."""

    @property
    def unreadable(self) -> list[str]:
        """The places that :meth:`checkpoints` has found whose manifests are damaged, or of a later version."""

    def sizes(self, found: TierCheckpoint) -> Mapping[str, int]:
        """Return the sizes of the files of a checkpoint that are listed, by their paths in the manifest."""

    def read(self, found: TierCheckpoint, entry: FileEntry) -> Iterator[Bytes]:
        """Yield the content of a file, from its begin to its end.

        Raises:
            CheckpointDamaged: it is not there, or larger. One that is shorter, or has changed, its digest tells.
        """

    def set_aside(self, after: int, before: int) -> None:
        """Set aside the checkpoints of earlier generations whose step is later: nobody resumes from them.

        Args:
            after: the step; -1 for all of them.
            before: the generation. That of this start may be later than the one with which it has claimed the tier.
        """
