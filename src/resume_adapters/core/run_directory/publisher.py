"""The status as it is published: by the training thread where the state changes, by the monitor in between."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from resume_adapters.core.run_directory.fencing import Fencing
from resume_adapters.core.run_directory.status import RunStatus, StatusFile


class StatusPublisher:
    """Writes ``status.json`` from two threads, the training thread and the monitor.

    Args:
        file: the status file.
        fencing: says whether this start still owns the run directory.
        describe: returns the status of a run that is in some state now.
    """

    def __init__(self, file: StatusFile, fencing: Fencing, describe: Callable[[str], RunStatus]) -> None:
        self._file = file
        self._fencing = fencing
        self._describe = describe
        self._state = ""
        self._writing = threading.Lock()

    def set_state(self, state: str, facts: Mapping[str, Any]) -> None:
        """Write the status of a run that has come into a state, unless a later start owns the run directory.

        Args:
            state: the state.
            facts: fields of :class:`RunStatus` that are known better than from the last
                step.
        """
        with self._writing:
            self._state = state
            if self._fencing.is_owned():
                status = self._describe(state)
                for name, value in facts.items():
                    setattr(status, name, value)
                self._file.write(status)

    def refresh(self) -> None:
        """Bring the status of a run that is running up to date."""
        with self._writing:
            if self._state == "running":  # what the training thread recorded meanwhile is news, this is not
                self._file.refresh(self._describe(self._state))
