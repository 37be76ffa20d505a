"""The files of a checkpoint that may be read: those that its manifest names. Reads only."""

from __future__ import annotations

from pathlib import Path

from resume_adapters.core.checkpoint import layout
from resume_adapters.core.checkpoint.manifest import Manifest
from resume_adapters.core.log import first_of
from resume_adapters.core.storage.base import Storage
from resume_adapters.errors import CheckpointDamaged


class CheckpointFiles:
    """The files of a checkpoint: those that its manifest names, of a foreign one those that lie in it.

    A loader that looks into the directory itself would also take what was laid there after the commit.

    Args:
        storage: where to read.
        checkpoint: the checkpoint's path.
        manifest: its manifest; ``None`` for a foreign checkpoint.
    """

    def __init__(self, storage: Storage, checkpoint: Path, manifest: Manifest | None) -> None:
        self.checkpoint = checkpoint
        self._storage = storage
        self._named = None if manifest is None else {entry.path for entry in manifest.files}

    def find(self, path: str) -> Path | None:
        """Return a file by its path in the checkpoint; ``None`` if the checkpoint has no such file."""
        if self._named is not None:
            return layout.locate(self._storage, self.checkpoint, path) if path in self._named else None
        file = layout.locate(self._storage, self.checkpoint, path)
        # A path with "..", an absolute one, or a link can lead out of it.
        inside = self._storage.real_path(self.checkpoint) in self._storage.real_path(file).parents
        return file if inside and self._storage.is_file(file) else None

    def require(self, path: str) -> Path:
        """Return a file by its path in the checkpoint.

        Raises:
            CheckpointDamaged: the checkpoint has no such file.
        """
        found = self.find(path)
        if found is None:
            raise CheckpointDamaged(f"{self.checkpoint.name} has no file {path}", path=self.checkpoint)
        return found

    def read(self, path: str) -> bytes:
        """Return the content of a file by its path in the checkpoint.

        Raises:
            CheckpointDamaged: the checkpoint has no such file, or it cannot be read.
        """
        try:
            return self._storage.read(self.require(path))
        except OSError as error:
            raise CheckpointDamaged(f"{path} cannot be read: {error.strerror}", path=self.checkpoint) from error

    def with_name(self, name: str) -> list[str]:
        """Return the paths of the files of this name, in any directory of the checkpoint."""
        held = self._named
        if held is None:
            held = {path.as_posix() for path, _ in layout.files(self._storage, self.checkpoint)}
        return sorted(path for path in held if path.rpartition("/")[2] == name)

    def extra(self) -> list[str]:
        """Return the paths of what lies in a committed checkpoint and is not in its manifest."""
        if self._named is None:
            return []
        found = (path.as_posix() for path, _, _ in layout.leaves(self._storage, self.checkpoint))
        return [path for path in found if path not in self._named]


def extra_in_words(extra: list[str]) -> str:
    """Return names of files for a message: the first few, and how many follow."""
    return first_of([path.encode("utf-8", "backslashreplace").decode() for path in extra], _SHOWN)


_SHOWN = 5
