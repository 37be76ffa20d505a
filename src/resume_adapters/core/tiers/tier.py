"""A tier: a place beyond the run directory that holds copies of committed checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from resume_adapters.core.checkpoint.layout import EXTRAS, locate
from resume_adapters.core.checkpoint.manifest import FileEntry, Manifest
from resume_adapters.core.checkpoint.retention import Candidate, Policy, plan_retention
from resume_adapters.core.storage.base import Bytes, Storage
from resume_adapters.errors import ResumeError

SHORTAGES = (ResumeError, OSError, RuntimeError, MemoryError)
"""What a copy may fail with and succeed later: what this package raises, and what a machine lacks. Where no thread can
be started, Python raises a RuntimeError.
"""


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


class LocalFile(NamedTuple):
    """A file of a committed checkpoint in the run directory, and what its manifest says of it."""

    path: Path
    entry: FileEntry

    @classmethod
    def of(cls, storage: Storage, checkpoint: Path, entries: Iterable[FileEntry]) -> tuple[LocalFile, ...]:
        """Return files of a committed checkpoint, by their entries in its manifest."""
        return tuple(cls(locate(storage, checkpoint, entry.path), entry) for entry in entries)


class Source(Protocol):
    """What a resume may take a checkpoint from. Methods may raise :class:`~resume_adapters.errors.TierUnavailable`."""

    @property
    def label(self) -> str:
        """Where it is, for messages; without credentials."""

    def checkpoints(self) -> list[TierCheckpoint]:
        """Return the checkpoints that are there, the one that a resume prefers first."""

    @property
    def unreadable(self) -> list[str]:
        """The places that :meth:`checkpoints` has found whose manifests are damaged, or of a later version."""

    def read(self, found: TierCheckpoint, entry: FileEntry) -> Iterator[Bytes]:
        """Yield the content of a file, from its begin to its end.

        Raises:
            CheckpointDamaged: it is not there, or does not have its size.
        """


class Tier(Source, Protocol):
    """Holds copies of committed checkpoints. One start of a run uses it, from one thread at a time.

    Every rank copies the files that it answers for; the leader of the run directory does the rest. Every method but
    ``label`` may raise :class:`~resume_adapters.errors.TierUnavailable`, and may then be called again.
    """

    @property
    def note(self) -> str:
        """What a person should know of it, for the status; empty if there is nothing."""

    def claim(self, after: int) -> int:
        """Take the tier over for this start: from now on, earlier starts add nothing to it.

        Args:
            after: the highest generation that is known elsewhere.

        Returns:
            The generation of this start: higher than ``after`` and than any that has claimed the tier.
        """

    def require_owned(self) -> None:
        """Check that no later start has claimed the tier.

        Raises:
            FencedOff: one has.
        """

    def set_aside(self, after: int, before: int) -> None:
        """Let nobody resume from the checkpoints of earlier generations whose step is later; nothing is removed.

        Args:
            after: the step; -1 for all of them.
            before: the generation. That of this start may be later than the one with which it has claimed the tier.
        """

    def copy(self, place: str, files: Sequence[LocalFile]) -> None:
        """Copy files of a committed checkpoint; what an earlier call has copied is not copied again.

        Args:
            place: where on the tier.
            files: those that this rank answers for.

        Raises:
            CheckpointDamaged: a file is no longer what the manifest says: it was pruned, or its name saved again.
        """

    def give_up(self) -> None:
        """Let a copy that is under way raise :class:`TierUnavailable` soon, and any other one; from another thread."""

    def commit(self, found: TierCheckpoint, generation: int) -> None:
        """Check that all files of a checkpoint are there, and write its manifest: from then on it is on the tier.

        Args:
            found: the checkpoint; an earlier start may have saved it.
            generation: of this start, which claims the tier with it where :meth:`claim` has failed.

        Raises:
            FencedOff: a later start has claimed the tier.
        """

    def remove(self, found: TierCheckpoint) -> None:
        """Remove a checkpoint: the manifest first, then the files."""


def is_one_file(name: str, manifest: Manifest) -> bool:
    """Return whether the framework's part of a checkpoint is one file of the checkpoint's name."""
    return [entry.path for entry in manifest.files if Path(entry.path).parts[0] != EXTRAS] == [name]


def prune(tier: Tier, keep: Policy, *, now: float, best: str | None) -> dict[str, str]:
    """Remove the checkpoints of a tier that a policy does not keep.

    Args:
        tier: the tier, owned by this start.
        keep: the policy.
        now: seconds since 1970.
        best: name of the best checkpoint.

    Raises:
        FencedOff: a later start has claimed the tier.

    Returns:
        The places that were removed, each with the reason.
    """
    found = tier.checkpoints()
    newest: dict[str, str] = {}
    for each in found:
        newest.setdefault(each.name, each.place)
    candidates = [
        Candidate(
            each.place,
            each.manifest.step,
            each.manifest.written,
            each.manifest.metrics,
            superseded=newest[each.name] != each.place,
        )
        for each in found
    ]
    anchor = found[0].place if found else None
    plan = plan_retention(candidates, keep, now=now, anchor=anchor, best=newest.get(best or ""))
    if plan.remove:
        tier.require_owned()  # listing them may have taken minutes
    for each in found:
        if each.place in plan.remove:
            tier.remove(each)
    return plan.remove
