"""The ``.resume`` directory of a run directory: its journal, its fencing token, its status and its stop file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from resume_adapters.core.checkpoint.layout import CONTROL
from resume_adapters.core.log import logger
from resume_adapters.core.run_directory.fencing import Fencing
from resume_adapters.core.run_directory.journal import Journal
from resume_adapters.core.run_directory.status import StatusFile
from resume_adapters.core.storage.base import Storage, write_atomically


class Leftovers:
    """Counts what one start could not remove, and warns once for each.

    A container that ran as another user may have left files in an old checkpoint, or NFS keeps a file that is still
    open. Training goes on; the next start tries again.
    """

    def __init__(self) -> None:
        self._found: set[Path] = set()

    def __len__(self) -> int:
        return len(self._found)

    def add(self, path: Path, error: OSError | None) -> None:
        """Count what could not be removed; ``None`` for an error: it is removed.

        Args:
            path: what was to be removed.
            error: the first of the errors.
        """
        if error is None or path in self._found:
            return
        self._found.add(path)
        logger.warning(
            "%s could not be removed: %s: %s. The run continues, and the next start tries again; remove it yourself to "
            "free its space.",
            path.name,
            error.filename or path,
            error.strerror,
        )


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
        except (FileNotFoundError, IsADirectoryError):
            return None
        except PermissionError:  # of the file, whose name is the request; or of the directory, which is no answer
            if not any(each.name == self.path.name for each in self._storage.entries(self.path.parent)):
                return None
            written = ""
        return written[:_LONGEST] or f"{self.path.name} in {self.path.parent.name}"

    def withdraw(self) -> None:
        """Remove the request."""
        if self._storage.is_file(self.path):
            self._storage.remove_file(self.path)


class ControlDirectory:
    """The files of a run directory that belong to the run, not to one checkpoint.

    Args:
        storage: the file operations.
        run_directory: where the run's checkpoints are.
        clock: returns seconds since 1970.
    """

    def __init__(self, storage: Storage, run_directory: Path, clock: Callable[[], float]) -> None:
        self.path = run_directory / CONTROL
        self.clock = clock
        self.journal = Journal(storage, self.path, clock)
        self.fencing = Fencing(storage, self.path, clock)
        self.status = StatusFile(storage, self.path, self.journal)
        self.stop_file = StopFile(storage, self.path)
        self.leftovers = Leftovers()
