"""The file with which any process that sees the run directory asks the run to stop."""

from __future__ import annotations

from pathlib import Path

from resume_adapters.core.storage.base import Storage, write_atomically

_LONGEST = 200
"""Characters of a reason that are read."""


class StopFile:
    """``.resume/stop``: while it exists, a stop is requested; its content is the reason.

    Args:
        storage: the file operations.
        directory: the ``.resume`` directory.
    """

    def __init__(self, storage: Storage, directory: Path) -> None:
        self._storage = storage
        self.path = directory / "stop"

    def request(self, reason: str) -> None:
        """Ask the run to stop."""
        write_atomically(self._storage, self.path, reason.encode())

    def reason(self) -> str | None:
        """Return why the file asks the run to stop; ``None`` if there is no such file.

        Raises:
            OSError: the file system cannot tell whether there is one.
        """
        try:
            written = self._storage.read(self.path).decode(errors="replace").strip()
        except FileNotFoundError:
            return None
        except (PermissionError, IsADirectoryError):  # it exists, and its name is the request
            written = ""
        return written[:_LONGEST] or f"{self.path.name} in {self.path.parent.name}"

    def withdraw(self) -> None:
        """Remove the request."""
        if self._storage.exists(self.path):
            self._storage.remove_file(self.path)
