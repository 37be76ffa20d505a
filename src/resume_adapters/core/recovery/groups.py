"""The process groups that a block makes: how a blocked rank leaves them, and how the next attempt makes others.

Gloo cannot be aborted through torch. What ends a blocked operation is that its connection is at its end. So the sockets
that appear while a group is made are remembered, and no more is read from them: also from the connection to the store
in which a group is made, where a rank waits for a peer that has left.

Gloo loses an operation for ever (until the timeout of the group) where a write fails, and where a transfer is half done
when it sees the end: ``Pair::signalException`` looks neither at what waits to be written nor at what is being read. So
each rank ends the reading of its own side alone; its connections stay open beside gloo, which would close them, so that
what the peer still writes does not fail; and a transfer that is under way may end before.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import inspect
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from resume_adapters.core.devices import kind_in_use
from resume_adapters.core.patching import replaced
from resume_adapters.core.recovery.attempt import LeftByPeer
from resume_adapters.core.storage.sockets import Connection, OpenSocket, open_sockets
from resume_adapters.errors import UnsupportedSetting

REST_THREAD = "resume-adapters-groups"
"""The name of the threads that keep the groups of a former attempt."""

_REST = 5.0
"""Seconds for which they do."""

_SETTLING = 0.005
"""Seconds for which nothing is on its way where no transfer is half done."""

_PATIENCE = 1.0
"""Seconds in which transfers may end."""

_OF_GROUP, _RANKS = ("group_name", "group_desc", "backend"), "global_ranks_in_group"  # seam: torch 2.6-2.13
"""How torch calls what it makes a group with."""


class BlockGroups:
    """The process groups of a block."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._sockets: set[OpenSocket] = set()
        self._making: list[set[OpenSocket]] = []
        self._connections: dict[OpenSocket, Connection] = {}
        self._ended: set[OpenSocket] = set()
        self._cut_since: float | None = None
        self._is_torn = False
        self._held: list[Any] = []
        self._store: Callable[[], Any] | None = None
        self._store_timeout: datetime.timedelta | None = None
        self._arguments: dict[str, Any] | None = None
        self._made: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Keep track of each group that is made while the context lasts.

        Raises:
            UnsupportedSetting: there is one already.
        """
        import torch.distributed as dist

        if not dist.is_available():
            yield
            return
        from torch.distributed import distributed_c10d

        if dist.is_initialized():
            raise UnsupportedSetting(
                "the process group was made before the restartable block began, so the block cannot be run again "
                "without it: call init_process_group(), or what calls it (Accelerator, TrainingArguments, "
                "deepspeed.initialize), within the block"
            )
        make, initialise = distributed_c10d._new_process_group_helper, dist.init_process_group  # seam: torch 2.6-2.13
        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced(distributed_c10d, make.__name__, self._watching(make)))
            for owner in (distributed_c10d, dist):
                stack.enter_context(replaced(owner, "init_process_group", self._initialising(initialise)))
            yield

    def _watching(self, native: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(native)

        def make(*arguments: Any, **keywords: Any) -> Any:
            given = signature.bind(*arguments, **keywords).arguments
            with self._remembering_sockets():
                made = native(*arguments, **keywords)
                if made[1] is not None:  # else this rank is no member of it
                    self._held.append(made[0])
            self._made.append({name: str(given.get(name)) for name in _OF_GROUP} | {"ranks": given[_RANKS]})
            return made

        return make

    @contextlib.contextmanager
    def _remembering_sockets(self) -> Iterator[None]:
        """Keep track of the sockets that appear while the context lasts.

        Raises:
            LeftByPeer: the groups are cut: the ranks do not make another one together.
        """
        with self._lock:
            self._require_uncut()
            before = open_sockets()
            self._making.append(before)
        try:
            yield
        finally:
            with self._lock:
                self._making.remove(before)
                self._sockets |= open_sockets() - before
            if self._cut_since is not None:
                self.cut()
        self._require_uncut()

    def _require_uncut(self) -> None:
        if self._cut_since is not None:
            raise LeftByPeer

    def _initialising(self, native: Callable[..., Any]) -> Callable[..., Any]:
        from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, but not exported for mypy
        from torch.distributed.constants import default_pg_timeout

        def init_process_group(*arguments: Any, **keywords: Any) -> Any:
            self._made = []
            given = inspect.signature(native).bind(*arguments, **keywords).arguments
            self._arguments = {name: given[name] for name in ("backend", "timeout", "device_id") if name in given}
            if self._store is None and _place()["world_size"] > 1:
                return native(*arguments, **keywords)
            # What is in the launcher's store under the usual names are the addresses of the attempt before.
            given = {name: value for name, value in given.items() if name != "init_method"}
            if self._store is None:  # alone: the port of a store that a group before has left may not be free yet
                return native(**{**given, **_place(), "store": HashStore()})
            with self._remembering_sockets():
                store = self._store()
            # torch does so with the stores that it makes itself.
            store.set_timeout(self._store_timeout or given.get("timeout") or default_pg_timeout)
            return native(**{**given, **_place(), "store": store})

        return init_process_group

    def use_store(self, store: Callable[[], Any], timeout: datetime.timedelta | None = None) -> None:
        """Make groups meet in a store of their own from now on; none of them is cut.

        Args:
            store: returns it.
            timeout: how long a rank waits there for another one; by default as long as in the group.
        """
        self._store, self._store_timeout = store, timeout
        self._cut_since = None

    def operations(self) -> int:
        """Return how many collective operations this rank has begun in all groups."""
        return sum(each._get_sequence_number_for_group() for each in list(self._held))  # seam: torch 2.6-2.13

    @contextlib.contextmanager
    def remade(self) -> Iterator[None]:
        """Have a group of all ranks while the context lasts, as the block has made it, if it has; and those of meshes.

        A distributed tensor finds the groups of its mesh by their names, by which torch counts all groups.

        Raises:
            RuntimeError: one has become another.
        """
        import torch.distributed as dist

        arguments = self._arguments
        if arguments is None:
            yield
            return
        former = self._made
        while former and not former[-1]["group_desc"].startswith("mesh"):  # seam: torch 2.6-2.13
            former.pop()
        try:
            dist.init_process_group(**arguments)
            for each in former[1:]:
                dist.new_group(each["ranks"], backend=each["backend"], group_desc=each["group_desc"])
                if self._made[-1] != each:
                    raise RuntimeError(f"the process group {each} was made again as {self._made[-1]}")
            yield
        finally:
            self.destroy()

    def cut(self) -> None:
        """End all communication of the groups: who waits in a collective gets an error. Any thread may call it.

        Until :meth:`use_store` no other group is made. Call it again until all threads have left: a transfer may be
        under way, and a connection may be made just now.
        """
        with self._lock:
            if self._cut_since is None:
                self._cut_since = time.monotonic()
            now = open_sockets()
            for each in self._sockets.union(*(now - before for before in self._making)) & now:
                if each not in self._connections and (found := Connection.of(each)) is not None:
                    self._connections[each] = found
            idle = self._idle()
        time.sleep(_SETTLING)
        with self._lock:
            idle &= self._idle()
            is_over = self._cut_since is not None and time.monotonic() > self._cut_since + _PATIENCE
            self._is_torn = self._is_torn or (is_over and idle != self._connections.keys() - self._ended)
            for each in self._connections.keys() - self._ended if is_over else idle:
                self._connections[each].end_reading()
                self._ended.add(each)
        _abort_accelerators(self._held)

    def _idle(self) -> set[OpenSocket]:
        """Return the connections that still can be read, and on which nothing is on its way."""
        return {each for each in self._connections.keys() - self._ended if self._connections[each].is_idle()}

    def destroy(self) -> None:
        """Destroy the groups of an attempt that was left."""
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()
        elif dist.is_available():
            _forget_unfinished()
        with self._lock:
            if self._is_torn:  # an operation may be lost in them: the thread that is in it does not end
                _lost.append((self._held, self._connections))
            elif self._held or self._connections:
                _let_rest(self._held, list(self._connections.values()))
            self._held, self._connections = [], {}
            self._sockets.clear()
            self._ended.clear()
            self._is_torn = False


def _forget_unfinished() -> None:
    """Let the names of groups begin again on a rank that was cut while it made its first: those of others do."""
    from torch.distributed import distributed_c10d

    world = distributed_c10d._world  # seam: torch 2.6-2.13
    for each in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config):
        each.clear()
    world.group_count = 0


_lost: list[Any] = []
"""Groups, with their connections, that are never destroyed."""


def _let_rest(groups: list[Any], connections: list[Connection]) -> None:
    """Drop the last references to groups later.

    Destroying a group joins the threads of gloo while the interpreter lock is held, and such a thread needs the lock
    once more when it drops what an operation has left. After a rest none does. DDP would not wait for that, nor would
    the end of the process: what a daemon thread has is dropped by nobody then.

    Args:
        groups: the groups.
        connections: theirs.
    """
    threading.Thread(target=_rest, args=(groups, connections, _REST), name=REST_THREAD, daemon=True).start()


def _rest(groups: list[Any], connections: list[Connection], seconds: float) -> None:
    time.sleep(seconds)
    with _dropping:
        for each in connections:
            each.close()
        groups.clear()


_LONGEST_DROP = 10.0
"""Seconds for which the end of a process waits for groups that are being dropped."""

_dropping = threading.Lock()
"""Held while groups are dropped, and by a process that ends."""


def _end_dropping() -> None:
    """Keep all groups from now on: torch would end a process that ends while one is destroyed by SIGABRT."""
    # A process that was forked while another thread held the lock does not wait for ever.
    _dropping.acquire(timeout=_LONGEST_DROP)


# Before the interpreter is finalised: daemon threads of all blocks may be there until then.
atexit.register(_end_dropping)


def _place() -> dict[str, int]:
    return {"rank": int(os.environ.get("RANK", "0")), "world_size": int(os.environ.get("WORLD_SIZE", "1"))}


def _abort_accelerators(groups: list[Any]) -> None:
    """Abort what NCCL and its like run; gloo's own ``abort`` leaves a blocked collective blocked."""
    import torch

    if (kind := kind_in_use()) is not None:
        for group in groups:
            with contextlib.suppress(RuntimeError):  # one of gloo alone; or a backend that cannot
                group._get_backend(torch.device(kind)).abort()  # seam: torch 2.6-2.13
