"""The status of a run as it is written: by the training thread where the state changes, by the heartbeat in between."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from resume_adapters.core.journal import Journal, Status


class LiveStatus:
    """Writes ``status.json`` from two threads, of which one brings news.

    Args:
        journal: what the run directory remembers.
        describe: returns the status of a run that is in some state now.
    """

    def __init__(self, journal: Journal, describe: Callable[[str], Status]) -> None:
        self._journal = journal
        self._describe = describe
        self._state = ""
        self._writing = threading.Lock()

    def record(self, state: str, facts: Mapping[str, Any]) -> None:
        """Write the status of a run that has come into a state, unless a later start owns the run directory.

        Args:
            state: the state.
            facts: fields of :class:`~resume_adapters.core.journal.Status` that are known better than from the last
                step.
        """
        with self._writing:
            self._state = state
            if self._journal.is_owned():
                status = self._describe(state)
                for name, value in facts.items():
                    setattr(status, name, value)
                self._journal.set_status(status)

    def refresh(self) -> None:
        """Bring the status of a run that is running up to date."""
        with self._writing:
            if self._state == "running":  # what the training thread recorded meanwhile is news, this is not
                self._journal.refresh_status(self._describe(self._state))
