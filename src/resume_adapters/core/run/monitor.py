"""Duties done once a second on a thread of their own: look for a request to stop, and refresh the live status.

The training thread only stores its progress. Files, processes and clocks are looked at here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from resume_adapters.core.log import logger

THREAD_NAME = "resume-adapters-monitor"
"""The name of the thread."""

_PERIOD = 1.0

_LAST_DUTY = 2.0
"""Seconds that the end of a run waits for a duty that has begun."""


class Monitor:
    """Runs short duties once a second.

    A duty that fails because of the file system (ESTALE, EIO) is logged once, and tried again the next second. One that
    does not return (a server that has died, a frozen mount) never holds up the end of a run.

    Args:
        duties: what to do, in this order, each after the words that name it in the log. None may wait for the training
            thread or for another rank.
    """

    def __init__(self, duties: Mapping[str, Callable[[], None]]) -> None:
        self._duties = duties
        self._failing: set[str] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=THREAD_NAME, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and wait for it, for two seconds at most: what its last duty would do, nobody misses."""
        self._ended.set()
        self._thread.join(_LAST_DUTY)

    def _watch(self) -> None:
        while not self._ended.wait(_PERIOD):
            for name, duty in self._duties.items():
                if not self._ended.is_set():
                    self._run(name, duty)

    def _run(self, name: str, duty: Callable[[], None]) -> None:
        try:
            duty()
        except OSError as error:
            if name not in self._failing:
                logger.warning("could not %s: %s; trying again once a second", name, error)
            self._failing.add(name)
        else:
            self._failing.discard(name)
