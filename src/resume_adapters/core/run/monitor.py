"""Once a second, on a thread of its own: what may ask a run to stop, and its live status.

The training thread only notes the step that it has completed. Files, processes and clocks are looked at here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

_PERIOD = 1.0


class Monitor:
    """Does a few short things once a second.

    Args:
        duties: what it does, in this order. None may wait for the training thread or for another rank.
    """

    def __init__(self, duties: Sequence[Callable[[], None]]) -> None:
        self._duties = duties
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="resume-adapters-heartbeat", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End; when this returns, nothing more is done."""
        self._ended.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._ended.wait(_PERIOD):
            for duty in self._duties:
                duty()
