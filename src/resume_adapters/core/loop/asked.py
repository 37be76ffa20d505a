"""A save that the script asks for: every rank takes it, or it is refused.

Below ``if rank == 0:`` one rank would wait for the others for ever, and they for it, in their next step. So the ranks
meet before such a save, and the thread of a rank's monitor, which nothing holds up, tells of one that has gone on.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

from resume_adapters.core.ranks import current_world_size
from resume_adapters.errors import UnsupportedSetting

_numbers = itertools.count()


class AskedSaves:
    """The saves that the script of one loop asks for, in a run of several ranks.

    Attributes:
        begun: bodies of the loop that this rank has begun; the loop counts them.
    """

    def __init__(self) -> None:
        self.begun = 0
        self._number = next(_numbers)
        self._meetings = 0
        self._watched: Any = None
        self._is_gone = False

    def meet(self, step: int) -> None:
        """Wait until every rank asks for a save here.

        Raises:
            UnsupportedSetting: a rank has gone on without.
        """
        self._meetings += 1
        meeting, store, end = f"{self._meetings}/{self.begun}", self._store(), time.monotonic() + 1800  # as torch waits
        store.add(meeting, 1)
        store.set("asked", meeting)
        while store.add(meeting, 0) < current_world_size():
            if store.check([f"{meeting}/passed"]) or time.monotonic() > end:
                raise UnsupportedSetting(
                    f"run.save() or run.best() asks for a checkpoint after step {step}, and not on every process: "
                    "each saves its own part, so one alone would wait for ever. Call it on all, not below "
                    "`if rank == 0:`, and give run.best() the same value on all, such as their mean"
                )
            time.sleep(0.02)

    def look(self) -> None:
        """Tell the ranks that wait that this one has gone on; called once a second, on the thread of the monitor."""
        if self._is_gone:
            return
        try:
            if self._watched is None:  # a connection of its own: on a shared one it would wait for the training
                shared = self._store()
                self._watched = shared.clone() if hasattr(shared, "clone") else shared  # torch 2.8 and later
            store = self._watched
            meeting = store.get("asked").decode() if store.check(["asked"]) else ""
            if meeting and self.begun > int(meeting.partition("/")[2]):
                store.set(f"{meeting}/passed", "")
        except ValueError:
            return  # there is no group yet, or no more
        except RuntimeError:  # the process with the store has ended
            self._is_gone = True  # for each further call torch would print a page

    def _store(self) -> Any:
        from torch.distributed.distributed_c10d import PrefixStore, _get_default_store  # seam: torch 2.6-2.13

        return PrefixStore(f"resume-adapters/asked/{self._number}", _get_default_store())
