"""How the ranks of a block learn of a failure and agree, past the process groups of the training."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from resume_adapters.core.recovery.launcher_store import LauncherStore
from resume_adapters.core.recovery.options import Launch
from resume_adapters.errors import PeerFailed

T = TypeVar("T")

_ASKED = 1.0
"""Seconds for which others are waited for in any case: as a rule all have come by then."""

_LONGEST = 1800.0
"""Seconds for which a rank waits for others that build their model, or end later: as long as torch does for a group."""

_LOOK_EVERY = 0.05


class SoloMeeting:
    """A block in a single process, with the methods of :class:`StoreMeeting`."""

    rank = 0
    world_size = 1
    is_gone = False

    def __init__(self) -> None:
        self.token = uuid.uuid4().hex  # a process of another container may have the same number
        self._written: dict[str, bytes] = {}
        self._announced: set[str] = set()

    def announce(self, topic: str) -> bool:
        is_first = topic not in self._announced
        self._announced.add(topic)
        return is_first

    def is_announced(self, topic: str) -> bool:
        return topic in self._announced

    def exchange(self, topic: str, value: T, kind: type[T], gives_up: Callable[[], str] = str) -> list[T]:
        return [value]

    def finish(self, topic: str) -> bool:
        return True

    def write(self, key: str, value: bytes) -> None:
        self._written[key] = value

    def read(self, key: str) -> bytes | None:
        return self._written.get(key)

    def groups_store(self, name: str) -> Any:
        from torch._C._distributed_c10d import HashStore  # seam: torch 2.6-2.13

        return HashStore()


class StoreMeeting:
    """Where the ranks of a block meet: in the store that torchrun keeps. Every exchange has a topic of its own.

    On several nodes, all ranks make it at the same time.

    Args:
        launch: the processes of the launch.
        timeout: seconds for which a rank waits for the others.
        grace: seconds that each may need before, to leave its step; then it comes.

    Attributes:
        rank: this rank.
        world_size: the number of ranks.
        token: distinguishes the launch from all others, alike on all ranks and after each restart by the launcher.
        start: distinguishes the processes of this start from those of others.
        is_gone: the launcher's store cannot be reached any more, as the watching thread has found.

    Raises:
        PeerFailed: the store cannot be reached.
    """

    def __init__(self, launch: Launch, timeout: float, *, grace: float = 0.0) -> None:
        self.rank = launch.rank
        self.world_size = launch.world_size
        self.is_gone = False
        self._launch = launch
        self._timeout = grace + timeout
        mine, watched = LauncherStore(launch, timeout), LauncherStore(launch, timeout)  # for one thread each
        self.token = mine.replace("resume_adapters/launch", "", uuid.uuid4().hex)
        self._starts, self._watched_starts = Starts(launch, mine), Starts(launch, watched)
        self.start = launch.start if launch.is_one_node else self._starts.agree(_LONGEST)
        self._watched_starts.mine = self._starts.mine
        self._store, self._watched = (each.below(launch.name, self.start, "meeting") for each in (mine, watched))

    def announce(self, topic: str) -> bool:
        """Let all ranks leave what they do together; return whether this rank is the first to say so."""
        return self._store.add(f"{topic}/failed", 1) == 1

    def is_announced(self, topic: str) -> bool:
        """Return whether a rank has said so. Another thread asks than the one that calls the other methods."""
        if not self.is_gone:
            try:
                return self._watched.has([f"{topic}/failed"]) or self._watched_starts.is_over
            except PeerFailed:
                self.is_gone = True
        return False

    def exchange(self, topic: str, value: T, kind: type[T], gives_up: Callable[[], str] = str) -> list[T]:
        """Return every rank's value, in rank order.

        Args:
            topic: see above.
            value: what this rank says.
            kind: its type.
            gives_up: returns why it waits for others no more; empty: it does.

        Raises:
            PeerFailed: a rank does not come in time; or the launcher starts all again, or is gone.
        """
        keys = self._come(topic, msgspec.json.encode(value))
        began = time.monotonic()
        looks = began + _LOOK_EVERY
        while not self._store.has(keys):
            now = time.monotonic()
            if now > looks:
                looks = now + _LOOK_EVERY
                reason = "torchrun starts all again" if self._starts.is_over else ""
                if not reason and now > began + _ASKED:
                    reason = gives_up()
                if reason:
                    raise PeerFailed(
                        f"{self._missing(keys)} after a failure: {reason}. This process ends, too, so that torchrun "
                        "starts all again (--max-restarts) and they resume from the newest checkpoint"
                    )
            if now > began + self._timeout:
                raise PeerFailed(
                    f"{self._missing(keys)} within {self._timeout:g} s after a failure: its process has died, or "
                    "hangs. This process ends, so that torchrun starts all again (--max-restarts) and they resume from "
                    "the newest checkpoint"
                )
            time.sleep(0.002)
        return [msgspec.json.decode(self._store.read(key) or b"", type=kind) for key in keys]

    def finish(self, topic: str) -> bool:
        """Wait until all ranks have come to the end; return ``False`` where one has failed meanwhile."""
        try:
            keys, ends = self._come(f"{topic}/done", b""), time.monotonic() + _LONGEST
            while not self._store.has(keys) and time.monotonic() < ends:
                if self._store.has([f"{topic}/failed"]) or self._starts.is_over:
                    return False
                time.sleep(_LOOK_EVERY)
        except PeerFailed:
            return True  # who is through needs nobody
        return True

    def _come(self, topic: str, value: bytes) -> list[str]:
        """Say something, and return under which keys all ranks say it."""
        keys = [f"{topic}/{rank}" for rank in range(self.world_size)]
        self._store.set(keys[self.rank], value)
        return keys

    def _missing(self, keys: list[str]) -> str:
        missing = [rank for rank, key in enumerate(keys) if not self._store.has([key])]
        return f"rank {missing[0] if missing else 0} did not meet the others"

    def write(self, key: str, value: bytes) -> None:
        """Let all ranks read a value. The thread calls it that asks :meth:`is_announced`."""
        if not self.is_gone:  # for each call then, torch would print a page
            try:
                self._watched.set(key, value)
            except PeerFailed:
                self.is_gone = True

    def read(self, key: str) -> bytes | None:
        """Return what a rank has written; ``None``: nothing. The same thread calls it."""
        if not self.is_gone:
            try:
                return self._watched.read(key)
            except PeerFailed:
                self.is_gone = True
        return None

    def groups_store(self, name: str) -> Any:
        """Return a store in which process groups are made, of that name."""
        return LauncherStore(self._launch, self._timeout).below(self._launch.name, self.start, "groups", name).native


Meeting = SoloMeeting | StoreMeeting


class Starts:
    """The starts of a launch on several nodes, each of which counts its own restarts.

    torchrun ends the processes of all nodes before it starts them again, or leaves those of the other nodes to fail.

    Args:
        launch: the processes of the launch.
        store: that of torchrun.

    Attributes:
        mine: the number of this start, once it is agreed on; on one node torchrun's own count serves.
    """

    def __init__(self, launch: Launch, store: LauncherStore) -> None:
        self.mine: int | None = None
        self._launch = launch
        self._store = store.below(launch.name, "starts")

    @property
    def is_over(self) -> bool:
        """Whether a later start of these ranks has begun."""
        return self.mine is not None and self._newest > self.mine

    @property
    def _newest(self) -> int:
        return int(self._store.read("newest") or b"0")

    def agree(self, seconds: float) -> str:
        """Return the number of this start, alike on all ranks. Every rank calls it, once in a process.

        A process takes the first start that none of its rank has taken, or a later one that another rank has taken. The
        first rank says when all have: of a start that some have missed, because they died, it never does.

        Args:
            seconds: for which a rank waits for the others.

        Raises:
            PeerFailed: a rank does not come.
        """
        mine, ends = self._take(0), time.monotonic() + seconds
        while not self._store.has([f"{mine}/all"]):
            if self._newest > mine:
                mine = self._take(self._newest)
            if self._launch.rank == 0 and self._store.add(f"{mine}/taken", 0) == self._launch.world_size:
                self._store.set(f"{mine}/all", "")
            elif time.monotonic() > ends:
                ranks = range(self._launch.world_size)
                missing = next((rank for rank in ranks if not self._store.has([f"{mine}/{rank}"])), 0)
                raise PeerFailed(f"rank {missing} has not come to the restartable block within {seconds:g} s")
            time.sleep(_LOOK_EVERY)
        self.mine = mine
        return f"{mine}"

    def _take(self, first: int) -> int:
        """Take the first start from a number on that no process of this rank has taken; return its number."""
        mine = next(each for each in itertools.count(first) if self._store.add(f"{each}/{self._launch.rank}", 1) == 1)
        self._store.add(f"{mine}/taken", 1)
        while (newest := self._newest) < mine:
            self._store.replace("newest", f"{newest}" if newest else "", f"{newest + 1}")
        return mine
