"""What a checkpoint holds beside the framework's own files, read again by one rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from resume_adapters.core import place, state
from resume_adapters.core.record import Record, Source
from resume_adapters.core.resolve import Checkpoint
from resume_adapters.core.state import Stateful
from resume_adapters.core.storage import Storage
from resume_adapters.errors import StateMismatch


class SavedParts:
    """The parts of the state that a checkpoint holds.

    Args:
        storage: where to read.
        checkpoint: the checkpoint.
        rank: the rank that reads.
    """

    def __init__(self, storage: Storage, checkpoint: Checkpoint, rank: int) -> None:
        self._storage = storage
        self._checkpoint = checkpoint
        self._rank = rank

    def own(self, rank: int | None = None) -> Any:
        """Return what a rank saved as its own; ``None`` in a foreign checkpoint.

        Args:
            rank: the rank; this one by default.
        """
        name = state.rank_file("", self._rank if rank is None else rank)
        found = state.read_part(self._storage, place.added(self._checkpoint.path), name)
        return None if found is None else Record(found, self._source(name))

    def part(self, name: str) -> Any:
        """Return a part as it was saved by this rank, or by the leader where the two were alike.

        Raises:
            CheckpointDamaged: the part's files do not fit together.
        """
        return state.read_part(self._storage, place.added(self._checkpoint.path), name, self._rank)

    def record(self, name: str) -> Record:
        """Return a part that this package saved for itself.

        Raises:
            FormatMismatch: there is none, since another version wrote the checkpoint; so does what the record lacks.
        """
        found, source = self.part(name), self._source(name)
        if found is None:
            raise source.lacks(source.file)
        return Record(found, source)

    def restore(self, parts: Mapping[str, Stateful], *, verify: bool) -> None:
        """Load every part and, with ``verify``, prove that it came back.

        Raises:
            StateMismatch: the checkpoint has no such part, though it was made by this package.
            NotRestored: a part's state after loading differs from what was saved.
        """
        for name, part in parts.items():
            saved = self.part(name)
            if saved is not None:
                state.restore(name, part, saved, verify=verify)
            elif self._checkpoint.manifest is not None:
                raise StateMismatch(
                    f"{self._checkpoint.path.name} has no part {name!r}: it was saved without it. Leave the part out, "
                    "or start another run directory",
                    path=self._checkpoint.path,
                )

    def _source(self, name: str) -> Source:
        manifest = self._checkpoint.manifest
        package = manifest.package if manifest else ""
        return Source(self._checkpoint.path, f"{name}.json", self._checkpoint.step, package)
