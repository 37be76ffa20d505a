"""Writes the status of a run: from the training thread when the state changes, from the monitor in between."""

from __future__ import annotations

import functools
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

    def announce(self, taken: RunStatus) -> None:
        """Write a status before the first state is set; the journal does not have this start yet."""
        self._try_to(functools.partial(self._file.refresh, taken), taken.state.value)

    def restore(self, former: RunStatus | None) -> None:
        """Write the status again that the start before left, if this one has set no state."""
        if self.state is None:
            work = self._file.remove if former is None else functools.partial(self._file.refresh, former)
            self._try_to(work, "as the launch before left it")

    def repeat(self) -> None:
        """Write the last state again, with what has changed beside it."""
        with self._writing:
            self._write()

    def _write(self) -> None:
        if (state := self.state) is not None:
            self._try_to(lambda: self._file.write(replace(self._describe(state), **self._facts)), state.value)

    def _try_to(self, write: Callable[[], None], state: str) -> None:
        try:
            if self._fencing.is_owned():
                write()
        except OSError as error:
            logger.error("The status of the run, which is %s, could not be written: %s", state, error)

    def refresh(self) -> None:
        """Update the status of a running run; a state that the training thread has set since stays."""
        with self._writing:
            if self.state is RunState.RUNNING:
                self._file.refresh(self._describe(self.state))
