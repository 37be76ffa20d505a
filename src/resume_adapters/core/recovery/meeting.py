"""How the ranks of a block learn of a failure and agree, past the process groups of the training."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import msgspec

from resume_adapters.core.recovery.launcher_store import below, connected
from resume_adapters.core.recovery.options import Launch
from resume_adapters.core.recovery.starts import Starts
from resume_adapters.core.stop.processes import is_dead, start_time
from resume_adapters.errors import PeerFailed

T = TypeVar("T")

_LOOK_EVERY = 0.05
"""Seconds between two looks whether a process lives."""

_OWN, _STAND_IN = "process", "stand-in"
"""Under which names the process of a rank is known, and one that takes its part."""

_DIED = "died"
"""Before the name of a process that has died, as its supervisor says."""

_ASKED = 1.0
"""Seconds for which a process that was asked to end waits for the others: as a rule all have come by then."""

_CLOCK = 5.0
"""Seconds by which the time at which a process began may differ when it is asked for again: the clock is set."""


class Meeting(Protocol):
    """Where the ranks of a block meet. Every exchange has a topic of its own."""

    rank: int
    world_size: int
    token: str

    def announce(self, topic: str) -> bool:
        """Let all ranks leave what they do together; return whether this rank is the first to say so."""

    def is_announced(self, topic: str) -> bool:
        """Return whether a rank has said so. Another thread asks than the one that calls the other methods."""

    def exchange(self, topic: str, value: T, kind: type[T]) -> list[T]:
        """Return every rank's value, in rank order.

        Raises:
            PeerFailed: a rank does not come, or its process has died.
        """

    def reports(self, topic: str, value: T, kind: type[T], is_to_end: Callable[[], bool] = bool) -> list[T | None]:
        """Return every rank's value, in rank order; ``None`` of those whose process has died.

        Args:
            topic: see above.
            value: what this rank says.
            kind: its type.
            is_to_end: returns whether this process was asked to end. On several nodes it does not wait for others then.

        Raises:
            PeerFailed: a rank does not come, and its process lives, or it is not known whether it does.
        """

    def finish(self, topic: str) -> bool:
        """Wait until all ranks have come to the end; return ``False`` where one has failed meanwhile."""

    def write(self, key: str, value: bytes) -> None:
        """Let all ranks read a value. The thread calls it that asks :meth:`is_announced`."""

    def read(self, key: str) -> bytes | None:
        """Return what a rank has written; ``None``: nothing. The same thread calls it."""

    def groups_store(self, name: str) -> Any:
        """Return a store in which process groups are made, of that name."""


class SoloMeeting:
    """A block in a single process."""

    rank = 0
    world_size = 1

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

    def exchange(self, topic: str, value: T, kind: type[T]) -> list[T]:
        return [value]

    def reports(self, topic: str, value: T, kind: type[T], is_to_end: Callable[[], bool] = bool) -> list[T | None]:
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


class _Process(msgspec.Struct, frozen=True):
    """A process of this node: its number alone would name another one later."""

    pid: int
    started: float | None

    @property
    def has_died(self) -> bool:
        found = start_time(self.pid)
        is_other = found is None or self.started is None or abs(found - self.started) > _CLOCK
        return is_other or is_dead(self.pid)


class StoreMeeting:
    """A meeting in the store that torchrun keeps.

    Args:
        launch: the processes of the launch.
        timeout: seconds for which a rank waits for the others.
        grace: seconds that each may need before, to leave its step; then it reports.
        stands_in: this process takes the part of a rank that has died. Who has not yet reported does not take it for
            the process of that rank, which would be waited for.

    Attributes:
        token: distinguishes the launch from all others, alike on all ranks and after each restart by torchrun.
    """

    def __init__(self, launch: Launch, timeout: float, *, grace: float = 0.0, stands_in: bool = False) -> None:
        self.rank = launch.rank
        self.world_size = launch.world_size
        self._launch = launch
        self._timeout = timeout
        self._grace = grace
        mine, watched = self._connected(), self._connected()  # a connection serves one thread at a time
        self.token = mine.compare_set("resume_adapters/launch", "", uuid.uuid4().hex).decode()
        self._store, self._watched = (below(each, launch, "meeting") for each in (mine, watched))
        self._starts, self._starts_watched = Starts(launch, mine), Starts(launch, watched)
        process = _Process(os.getpid(), start_time(os.getpid()))
        self._store.set(f"{_STAND_IN if stands_in else _OWN}/{self.rank}", msgspec.json.encode(process))

    def _connected(self) -> Any:
        return connected(self._launch, self._timeout)

    def _connect(self, name: str) -> Any:
        return below(self._connected(), self._launch, name)

    def announce(self, topic: str) -> bool:
        return bool(self._store.add(f"{topic}/failed", 1) == 1)

    def is_announced(self, topic: str) -> bool:
        try:
            is_failed = bool(self._watched.check([f"{topic}/failed"]))
            return is_failed or self._starts_watched.is_over
        except RuntimeError:  # the launcher is gone: the main thread gets the error when it comes to the meeting
            return True

    def exchange(self, topic: str, value: T, kind: type[T]) -> list[T]:
        keys = self._set(topic, msgspec.json.encode(value))
        lost = self._wait(keys, (_OWN, _STAND_IN), self._timeout)
        if lost:
            raise PeerFailed(f"the process of rank {lost[0]} has died after a failure, while the ranks met")
        return [msgspec.json.decode(self._store.get(key), type=kind) for key in keys]

    def reports(self, topic: str, value: T, kind: type[T], is_to_end: Callable[[], bool] = bool) -> list[T | None]:
        keys = self._set(topic, msgspec.json.encode(value))
        lost = self._wait(keys, (_OWN,), self._grace + self._timeout, is_to_end)
        return [
            None if rank in lost else msgspec.json.decode(self._store.get(key), type=kind)
            for rank, key in enumerate(keys)
        ]

    def finish(self, topic: str) -> bool:
        keys = self._set(f"{topic}/done", b"")
        failed = f"{topic}/failed"
        while not self._store.check(keys):
            if self._store.check([failed]):
                return False
            lost = self._lost(keys, (_OWN,))
            if lost:
                raise PeerFailed(f"the process of rank {lost[0]} has died before the end of the block")
            time.sleep(0.05)
        return True

    def _set(self, topic: str, value: bytes) -> list[str]:
        """Say something, and return under which names all ranks say it."""
        keys = [f"{topic}/{rank}" for rank in range(self.world_size)]
        self._store.set(keys[self.rank], value)
        return keys

    def _wait(
        self, keys: list[str], processes: tuple[str, ...], seconds: float, is_to_end: Callable[[], bool] = bool
    ) -> list[int]:
        """Wait until all ranks have said something; return those that never will, since their process has died.

        Args:
            keys: under which they say it.
            processes: of which processes of a rank one is waited for, if it lives.
            seconds: for how long.
            is_to_end: as :meth:`reports` says.

        Raises:
            PeerFailed: one does not come, and lives.
        """
        began = time.monotonic()
        ends, looks = began + seconds, began + _LOOK_EVERY
        while not self._store.check(keys):
            now = time.monotonic()
            if now > looks:
                looks = now + _LOOK_EVERY
                lost = self._lost(keys, processes)
                if lost and all(rank in lost or self._store.check([key]) for rank, key in enumerate(keys)):
                    return lost
                if not self._launch.is_one_node:
                    self._require_start(is_asked=now > began + _ASKED and is_to_end())
            if now > ends:
                missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                raise PeerFailed(
                    f"after a failure, rank {missing[0] if missing else 0} did not meet the others within "
                    f"{seconds:g} s: it is gone, or hangs. This process ends, so that torchrun starts all again "
                    "and they resume from the latest checkpoint (--max-restarts)"
                )
            time.sleep(0.002)
        return []

    def _require_start(self, *, is_asked: bool) -> None:
        """Wait for nobody where torchrun starts all processes again: on several nodes it says so to each by itself.

        Raises:
            PeerFailed: it does.
        """
        if is_asked or self._starts.is_over:
            raise PeerFailed(
                "after a failure, torchrun starts the processes of all nodes again: one has died. This one ends, and "
                "they resume from the latest checkpoint"
            )

    def _lost(self, keys: list[str], processes: tuple[str, ...]) -> list[int]:
        """Return the ranks that have not said something before their process died; on one node, where that is seen."""
        if not self._launch.is_one_node:
            return []
        silent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        dead = [rank for rank in silent if self._has_died(rank, processes)]
        return [rank for rank in dead if not self._store.check([keys[rank]])]  # it may have been its last word

    def _has_died(self, rank: int, processes: tuple[str, ...]) -> bool:
        known = [found for each in processes if (found := self._is_gone(f"{each}/{rank}")) is not None]
        return bool(known) and all(known)

    def _is_gone(self, process: str) -> bool | None:
        """Return whether a process has died; ``None`` where it is not known, or has not come yet."""
        if self._store.check([f"{_DIED}/{process}"]):
            return True
        if not self._store.check([process]):
            return None
        return bool(msgspec.json.decode(self._store.get(process), type=_Process).has_died)

    def write(self, key: str, value: bytes) -> None:
        with contextlib.suppress(RuntimeError):  # is_announced says that the launcher is gone
            self._watched.set(key, value)

    def read(self, key: str) -> bytes | None:
        with contextlib.suppress(RuntimeError):
            return bytes(self._watched.get(key)) if self._watched.check([key]) else None
        return None

    def groups_store(self, name: str) -> Any:
        return self._connect(f"groups/{name}")


class SupervisorMeeting:
    """Where the supervisors of the ranks meet when a process that trains has ended.

    Args:
        launch: the processes of the launch, as the process that has ended knows them.
        timeout: seconds for which the store is waited for; torch asks for the name of its host, which may take some.
    """

    def __init__(self, launch: Launch, timeout: float = 20.0) -> None:
        self._rank = launch.rank
        self._keys = [f"{rank}" for rank in range(launch.world_size)]
        connection = connected(launch, timeout)
        self._trainers = below(connection, launch, "meeting")
        self._store = below(connection, launch, "supervisors")

    def announce_death(self, topic: str) -> None:
        """Let the processes of the other ranks leave what they do: that of this rank has died."""
        self._trainers.set(f"{_DIED}/{_OWN}/{self._rank}", b"")
        self._trainers.add(f"{topic}/failed", 1)

    def say(self, *, wants_another: bool) -> None:
        """Say whether another process is to go on in the place of the one that has ended."""
        self._store.set(self._keys[self._rank], b"another" if wants_another else b"")

    def all_want_another(self) -> bool | None:
        """Return whether all supervisors have said so; ``None`` as long as that is not known."""
        said = [self._store.get(key) for key in self._keys if self._store.check([key])]
        if not all(said):
            return False
        return True if len(said) == len(self._keys) else None
