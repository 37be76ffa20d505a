"""Ranks on several nodes that are threads of this process, so that each operation of each can be the one that fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

from resume_adapters.core.storage.local import LocalStorage
from resume_adapters.errors import ResumeError

from faults import Crash, CrashingStorage

T = TypeVar("T")
NODES = 2


class World:
    """Ranks that are threads. Where one is killed, the others are at their next question, as by a launcher."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.dead = False
        self._channels: dict[Any, tuple[list[Any], threading.Barrier]] = {}
        self._lock = threading.Lock()

    def channel(self, key: Any, size: int) -> tuple[list[Any], threading.Barrier]:
        with self._lock:
            if self.dead:
                raise Crash("another rank is dead")
            return self._channels.setdefault(key, ([None] * size, threading.Barrier(size)))

    def die(self) -> None:
        with self._lock:
            self.dead = True
            for _, barrier in self._channels.values():
                barrier.abort()


class Threads:
    """One rank of a world."""

    def __init__(self, world: World, of_all: int, members: Sequence[int], made: list[int]) -> None:
        self.local_rank = of_all % (world.size // NODES)
        self._world, self._of_all, self._members, self._made = world, of_all, tuple(members), made
        self.rank = self._members.index(of_all) if of_all in self._members else -1
        self.world_size = len(self._members)
        self._key = (len(made), self._members)
        made.append(0)

    def gather(self, value: T) -> list[T]:
        values, barrier = self._world.channel(self._key, self.world_size)
        try:
            values[self.rank] = value
            barrier.wait(240)
            found = list(values)
            barrier.wait(240)
        except threading.BrokenBarrierError as error:
            assert self._world.dead, "a rank waits for another that does not come"
            raise Crash("another rank is dead") from error
        return found

    def broadcast(self, value: T, root: int) -> T:
        return self.gather(value)[root]

    def barrier(self) -> None:
        self.gather(None)

    def new_channel(self, timeout: timedelta | None = None) -> Threads:
        return Threads(self._world, self._of_all, self._members, self._made)

    def subset(self, ranks: Sequence[int], timeout: timedelta | None = None) -> Threads:
        return Threads(self._world, self._of_all, ranks, self._made)

    def close(self) -> None:
        return None


class Mortal(CrashingStorage):
    """A disk whose process takes the others of its world with it."""

    world: World

    def _die(self) -> None:
        self.world.die()
        super()._die()


def on_nodes(
    work: Callable[[int, dict[str, Any]], T], storages: Sequence[LocalStorage] = (), *, ranks: int = NODES
) -> list[Any]:
    """Do ``work(rank, options)`` on every rank; return what each returned, or what ended it."""
    world = World(ranks)
    disks = storages or [LocalStorage() for _ in range(ranks)]
    for disk in disks:
        if isinstance(disk, Mortal):
            disk.world = world

    def one(rank: int) -> Any:
        of_rank = Threads(world, rank, range(ranks), [])
        try:
            return work(rank, {"ranks": of_rank, "storage": disks[rank]})
        except (Crash, ResumeError) as error:
            return error

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(one, range(ranks)))
