"""A pending checkpoint that stands in a run directory until the first one is committed.

Scripts refuse a directory that is not empty and has no checkpoint, as the examples of transformers 4 do, and
``.resume`` alone would let them refuse every launch after a kill before the first commit.
"""

from __future__ import annotations

from pathlib import Path

from resume_adapters.core.checkpoint.catalog import candidates
from resume_adapters.core.checkpoint.layout import EXTRAS, PENDING, CheckpointState, pending_text, state_of
from resume_adapters.core.checkpoint.remove import Fence, delete
from resume_adapters.core.checkpoint.validity import ForeignDetector
from resume_adapters.core.run_directory.control import Leftovers
from resume_adapters.core.run_directory.upkeep import is_checkpoint, usable
from resume_adapters.core.storage.base import Storage, make_durable_directory


class Placeholder:
    """The placeholder of a run directory.

    Args:
        storage: the file operations.
        directory: the run directory.
        name: its name; ``None`` where the framework needs none.
    """

    def __init__(self, storage: Storage, directory: Path, name: str | None) -> None:
        self._storage = storage
        self._path = None if name is None else directory / name

    def place(self, foreign: ForeignDetector, *, is_scratch: bool) -> None:
        """Make it where the run directory has no checkpoint, before anything else of this package is there.

        Args:
            foreign: recognises the checkpoints of the bare framework.
            is_scratch: the checkpoints that are there will be set aside.

        Raises:
            RunDirectoryUnusable: the run directory is a file, or cannot be written.
        """
        path = self._path
        if path is None or not self._is_free(path) or (self._has_checkpoint(path, foreign) and not is_scratch):
            return
        with usable(path.parent):
            # Without its marker it would look foreign: a kill in between leaves it to the next start.
            make_durable_directory(self._storage, path / EXTRAS)
            self._storage.write(path / EXTRAS / PENDING, pending_text(path.name))
            self._storage.sync(path / EXTRAS / PENDING)

    def _is_free(self, path: Path) -> bool:
        """Return whether nothing has the name but a placeholder, which a kill may have cut off before its marker."""
        storage, extras = self._storage, path / EXTRAS
        if state_of(storage, path) in (CheckpointState.PENDING, CheckpointState.REMOVED):
            return True
        names = [entry.name for entry in storage.entries(path)] if storage.is_directory(path) else [""]
        return names == [] or (names == [EXTRAS] and not storage.entries(extras))

    def _has_checkpoint(self, path: Path, foreign: ForeignDetector) -> bool:
        return any(
            state_of(self._storage, each) is not CheckpointState.PENDING and is_checkpoint(self._storage, each, foreign)
            for each in candidates(self._storage, path.parent)
            if each != path
        )

    def is_at(self, path: Path) -> bool:
        """Return whether a path is the placeholder's."""
        return path == self._path

    def remove(self, leftovers: Leftovers, fence: Fence) -> None:
        """Remove it, once a checkpoint is committed.

        Args:
            leftovers: counts what cannot be removed.
            fence: raises where a later start owns the run directory.

        Raises:
            FencedOff: a later start owns the run directory.
        """
        if self._path is not None and state_of(self._storage, self._path) is CheckpointState.PENDING:
            leftovers.add(self._path, delete(self._storage, self._path, fence))
