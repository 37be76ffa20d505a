"""Which start of a launch on several nodes this is: each node counts its own restarts."""

from __future__ import annotations

import itertools
import time
from typing import Any

from resume_adapters.core.recovery.launcher_store import connected
from resume_adapters.core.recovery.options import Launch
from resume_adapters.errors import PeerFailed

_LOOK_EVERY = 0.05
"""Seconds between two looks whether all ranks have come."""


class Starts:
    """The starts of a launch on several nodes, each of which counts its own restarts.

    torchrun ends the processes of all nodes before it starts them again, or leaves those of the other nodes to fail.

    Args:
        launch: the processes of the launch.
        store: that of torchrun.
    """

    def __init__(self, launch: Launch, store: Any) -> None:
        from torch._C._distributed_c10d import PrefixStore  # seam: torch 2.6-2.13

        self._launch = launch
        self._store = PrefixStore(f"resume_adapters/{launch.name}/starts", store)

    @property
    def is_over(self) -> bool:
        """Whether a later start of these ranks has begun."""
        return not self._launch.is_one_node and self._newest > int(self._launch.start)

    @property
    def _newest(self) -> int:
        return int(self._store.get("newest")) if self._store.check(["newest"]) else 0

    def agree(self, timeout: float) -> str:
        """Return the number of this start, alike on all ranks. Every rank calls it, once in a process.

        A process takes the first start that none of its rank has taken, or a later one that another rank has taken. The
        first rank says when all have: of a start that some have missed, because they died, it never does.

        Args:
            timeout: seconds for which a rank waits for the others.

        Raises:
            PeerFailed: a rank does not come.
        """
        mine, ends = self._take(0), time.monotonic() + timeout
        while not self._store.check([f"{mine}/all"]):
            if self._newest > mine:
                mine = self._take(self._newest)
            if self._launch.rank == 0 and self._store.add(f"{mine}/taken", 0) == self._launch.world_size:
                self._store.set(f"{mine}/all", "")
            elif time.monotonic() > ends:
                ranks = range(self._launch.world_size)
                missing = next((rank for rank in ranks if not self._store.check([f"{mine}/{rank}"])), 0)
                raise PeerFailed(f"rank {missing} has not come to the restartable block within {timeout:g} s")
            time.sleep(_LOOK_EVERY)
        return f"{mine}"

    def _take(self, first: int) -> int:
        """Take the first start from a number on that no process of this rank has taken; return its number."""
        mine = next(each for each in itertools.count(first) if self._store.add(f"{each}/{self._launch.rank}", 1) == 1)
        self._store.add(f"{mine}/taken", 1)
        while (newest := self._newest) < mine:
            self._store.compare_set("newest", f"{newest}" if newest else "", f"{newest + 1}")
        return mine


def agreed_start(launch: Launch, timeout: float = 1800.0) -> str:
    """Return the number of a start on several nodes; see :meth:`Starts.agree`.

    Args:
        launch: the processes of the launch.
        timeout: seconds for which a rank waits for the others; by default as long as torch does for a group.
    """
    return Starts(launch, connected(launch, timeout)).agree(timeout)
