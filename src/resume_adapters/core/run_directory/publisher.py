"""Writes the status of a run: from the training thread when the state changes, from the monitor in between."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from resume_adapters.core.log import logger
from resume_adapters.core.run_directory.fencing import Fencing
from resume_adapters.core.run_directory.status import RunState, RunStatus, StatusFile


class StatusPublisher:
    """Writes ``status.json`` from two threads, the training thread and the monitor.

    Args:
        file: the status file.
        fencing: knows whether this start still owns the run directory.
        describe: returns the present status of a run, given its state.

    Attributes:
        state: the last one that was set; ``None`` before the first.
    """

    def __init__(self, file: StatusFile, fencing: Fencing, describe: Callable[[RunState], RunStatus]) -> None:
        self._file = file
        self._fencing = fencing
        self._describe = describe
        self.state: RunState | None = None
        self._facts: Mapping[str, Any] = {}
        self._writing = threading.Lock()

    def set_state(self, state: RunState, facts: Mapping[str, Any]) -> None:
        """Write the status of a run that changes its state, unless a later start owns the run directory.

        It is for people to look at: where it cannot be written, that is logged.

        Args:
            state: the new state.
            facts: fields of :class:`RunStatus` that are known better than from the last step.
        """
        with self._writing:
            self.state, self._facts = state, facts
            self._write()

    def repeat(self) -> None:
        """Write the last state again, with what has changed beside it."""
        with self._writing:
            self._write()

    def _write(self) -> None:
        if self.state is None:
            return
        try:
            if self._fencing.is_owned():
                self._file.write(replace(self._describe(self.state), **self._facts))
        except OSError as error:
            logger.error("The status of the run, which is %s, could not be written: %s", self.state.value, error)

    def refresh(self) -> None:
        """Update the status of a running run; a state that the training thread has set since stays."""
        with self._writing:
            if self.state is RunState.RUNNING:
                self._file.refresh(self._describe(self.state))
