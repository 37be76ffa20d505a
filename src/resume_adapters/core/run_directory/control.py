"""The ``.resume`` directory of a run directory: its journal, its fencing token, its status and its stop file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from resume_adapters.core.checkpoint.layout import CONTROL
from resume_adapters.core.run_directory.fencing import Fencing
from resume_adapters.core.run_directory.journal import Journal
from resume_adapters.core.run_directory.leftovers import Leftovers
from resume_adapters.core.run_directory.status import StatusFile
from resume_adapters.core.run_directory.stop_file import StopFile
from resume_adapters.core.storage.base import Storage


class ControlDirectory:
    """The files of a run directory that belong to the run, not to one checkpoint.

    Args:
        storage: the file operations.
        run_directory: where the run's checkpoints are.
        clock: returns seconds since 1970.
    """

    def __init__(self, storage: Storage, run_directory: Path, clock: Callable[[], float]) -> None:
        self.path = run_directory / CONTROL
        self.journal = Journal(storage, self.path, clock)
        self.fencing = Fencing(storage, self.path, clock)
        self.status = StatusFile(storage, self.path, self.journal, clock)
        self.stop_file = StopFile(storage, self.path)
        self.leftovers = Leftovers()
