"""How the ranks of a block learn of a failure and agree, past the process groups of the training.

They meet in the store that torchrun keeps, which outlives the processes of a launch. A process alone meets itself.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from resume_adapters.core.recovery.options import Launch
from resume_adapters.errors import PeerFailed

T = TypeVar("T")

_ASKED = 1.0
"""Seconds for which others are waited for in any case: as a rule all have come by then."""

_LONGEST = 1800.0
"""Seconds for which a rank waits for others that build their model, or end later: as long as torch does for a group."""

_LOOK_EVERY = 0.05

_GONE = (
    "the store of torchrun cannot be reached: torchrun has ended, or its machine is gone. Launch the same command "
    "again: it resumes from the newest checkpoint"
)


class LauncherStore:
    """A connection to the store; one thread at a time uses it. No call waits without a limit.

    Args:
        launch: the processes of the launch; one that is alone has a store of its own.
        seconds: the limit for each call.

    Raises:
        PeerFailed: the store cannot be reached; also by each method.
    """

    def __init__(self, launch: Launch, seconds: float) -> None:
        self.native: Any = _Own()
        self.prefix = "resume_adapters"
        if launch.world_size > 1:
            from torch._C._distributed_c10d import TCPStore  # seam: torch 2.6-2.13

            timeout = datetime.timedelta(seconds=seconds)
            with _reaching():
                self.native = TCPStore(launch.host, launch.port, None, False, timeout, wait_for_workers=False)

    def below(self, *names: str) -> LauncherStore:
        """Return a part of the store, on the same connection."""
        part = object.__new__(LauncherStore)
        part.native, part.prefix = self.native, "/".join((self.prefix, *names))
        return part

    def _full(self, key: str) -> str:
        return f"{self.prefix}/{key}"

    def set(self, key: str, value: bytes | str) -> None:
        """Write a value."""
        with _reaching():
            self.native.set(self._full(key), value)

    def add(self, key: str, number: int) -> int:
        """Add to a number, and return it."""
        with _reaching():
            return int(self.native.add(self._full(key), number))

    def has(self, keys: Sequence[str]) -> bool:
        """Return whether all keys have values."""
        with _reaching():
            return bool(self.native.check(list(map(self._full, keys))))

    def read(self, key: str) -> bytes | None:
        """Return a value; ``None`` where there is none yet. Nothing here is deleted, so it never waits for one."""
        key = self._full(key)
        with _reaching():
            return bytes(self.native.get(key)) if self.native.check([key]) else None

    def replace(self, key: str, expected: str, value: str) -> str:
        """Write a value if another one is there (empty: none), and return what is there then."""
        with _reaching():
            return str(self.native.compare_set(self._full(key), expected, value).decode())


class _Own(dict[str, Any]):
    """What a process alone needs of a store of torch, which may have been built without."""

    def set(self, key: str, value: bytes) -> None:
        self[key] = value

    def add(self, key: str, number: int) -> int:
        self[key] = self.get(key, 0) + number
        return int(self[key])

    def check(self, keys: list[str]) -> bool:
        return self.keys() >= {*keys}

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        return str(self.setdefault(key, value)).encode()


@contextlib.contextmanager
def _reaching() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch's DistNetworkError and its kin
        raise PeerFailed(_GONE) from error


class Meeting:
    """Where the ranks of a block meet. Every exchange has a topic of its own.

    On several nodes, all ranks make it at the same time.

    Args:
        timeout: seconds for which a rank waits for the others.
        grace: seconds that each may need before, to leave its step; then it comes.

    Attributes:
        rank: this rank.
        world_size: the number of ranks.
        token: distinguishes the launch from all others, alike on all ranks and after each restart by the launcher.
        start: distinguishes the processes of this start from those of others.

    Raises:
        PeerFailed: the store cannot be reached.
    """

    def __init__(self, launch: Launch, timeout: float, *, grace: float = 0.0) -> None:
        self.rank = launch.rank
        self.world_size = launch.world_size
        self._is_gone = False
        self._launch = launch
        self._timeout = grace + timeout
        mine = LauncherStore(launch, timeout)
        watched = LauncherStore(launch, timeout) if launch.world_size > 1 else mine  # for one thread each
        self.token = mine.replace("launch", "", uuid.uuid4().hex)
        self._starts, self._watched_starts = Starts(launch, mine), Starts(launch, watched)
        self.start = launch.start if launch.is_one_node else self._starts.agree(_LONGEST)
        self._watched_starts.mine = self._starts.mine
        self._store, self._watched = (each.below(launch.name, self.start, "meeting") for each in (mine, watched))

    def announce(self, topic: str) -> bool:
        """Ask all ranks to leave what they do together; return whether this rank is the first to."""
        return self._store.add(f"{topic}/failed", 1) == 1

    def is_announced(self, topic: str) -> bool:
        """Return whether a rank has said so. Another thread asks than the one that calls the other methods."""
        return bool(self._watching(lambda: self._watched.has([f"{topic}/failed"]) or self._watched_starts.is_over))

    def exchange(self, topic: str, value: T, kind: type[T], must_end: Callable[[], bool] = bool) -> list[T]:
        """Return every rank's value, in rank order.

        Args:
            topic: see above.
            value: what this rank says.
            kind: its type.
            must_end: returns whether the launcher has asked this process to end.

        Raises:
            PeerFailed: a rank does not come in time; or the launcher starts all again, or is gone.
        """
        keys = self._come(topic, msgspec.json.encode(value))
        began = time.monotonic()
        looks = began + _LOOK_EVERY
        while not self._store.has(keys):
            now, reason = time.monotonic(), ""
            if now > looks:
                looks = now + _LOOK_EVERY
                if self._starts.is_over:
                    reason = "after a failure: torchrun starts all again"
                elif now > began + _ASKED and must_end():
                    reason = "after a failure: the launcher ends all processes, since one has died, as a rule"
            if now > began + self._timeout:
                reason = f"within {self._timeout:g} s after a failure: its process has died, or hangs"
            if reason:
                raise PeerFailed(
                    f"{self._missing(keys)} {reason}. This process ends, so that torchrun starts all again "
                    "(--max-restarts) and they resume from the newest checkpoint"
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
        self._watching(lambda: self._watched.set(key, value))

    def read(self, key: str) -> bytes | None:
        """Return what a rank has written; ``None``: nothing. The same thread calls it."""
        return self._watching(lambda: self._watched.read(key))

    def _watching(self, ask: Callable[[], T]) -> T | None:
        if not self._is_gone:  # for each call then, torch would print a page
            try:
                return ask()
            except PeerFailed:
                self._is_gone = True
        return None

    def groups_store(self, name: str) -> Any:
        """Return a store in which process groups are made, of that name."""
        from torch._C._distributed_c10d import HashStore, PrefixStore  # seam: torch 2.6-2.13

        if self.world_size == 1:
            return HashStore()
        part = LauncherStore(self._launch, self._timeout).below(self._launch.name, self.start, "groups", name)
        return PrefixStore(part.prefix, part.native)


class Starts:
    """The starts of a launch on several nodes, each of which counts its own restarts.

    torchrun ends the processes of all nodes before it starts them again, or leaves those of the other nodes to fail.

    Args:
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
