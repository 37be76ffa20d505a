"""The few collective operations that the core needs, on one process or many.

Every channel is a gloo group of its own, so its traffic meets neither the training's collectives nor an accelerator.
The caller that makes a channel closes it. Groups that the training made, such as those of DDP, are never touched: DDP's
destructor can deadlock on the interpreter lock when it joins gloo's thread.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar, cast

from resume_adapters.core import devices
from resume_adapters.errors import PeerFailed, ResumeError

T = TypeVar("T")

_LOCAL_RANK = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "PMI_LOCAL_RANK")
"""Where launchers say which process of its node one is. Lightning says it of all but the first."""


class Ranks(Protocol):
    """The processes of one run.

    Attributes:
        rank: the number of this process.
        world_size: the number of processes.
        local_rank: the number of this process among those of its node.
    """

    rank: int
    world_size: int
    local_rank: int

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, in rank order, on every rank."""

    def broadcast(self, value: T, root: int) -> T:
        """Return the value of one rank on every rank; what the others give is not used."""

    def barrier(self) -> None:
        """Return when every rank has called it."""

    def new_channel(self, timeout: timedelta | None = None) -> Ranks:
        """Return the same ranks with a channel of their own, for another thread. Every rank calls it.

        Args:
            timeout: how long a rank waits for the others; by default as in a group of the training, half an hour.
        """

    def subset(self, ranks: Sequence[int], timeout: timedelta | None = None) -> Ranks:
        """Return some of the ranks, in ascending order, with a channel of their own. Every rank calls it."""

    def close(self) -> None:
        """Release the channel; nothing can be sent over it any more. Those made from it stay open."""


class SingleProcess:
    """A run of one process."""

    rank = 0
    world_size = 1
    local_rank = 0

    def gather(self, value: T) -> list[T]:
        return [value]

    def broadcast(self, value: T, root: int) -> T:
        return value

    def barrier(self) -> None:
        return None

    def new_channel(self, timeout: timedelta | None = None) -> Ranks:
        return self

    def subset(self, ranks: Sequence[int], timeout: timedelta | None = None) -> Ranks:
        return self

    def close(self) -> None:
        return None


SINGLE_PROCESS = SingleProcess()


class DistributedRanks:
    """The ranks of ``torch.distributed``, or some of them, over a gloo group of their own.

    Args:
        members: the ranks, in ascending order; all by default. Every rank makes the group, but only these use it.
        timeout: see :meth:`Ranks.new_channel`.
    """

    def __init__(self, members: Sequence[int] | None = None, timeout: timedelta | None = None) -> None:
        import torch.distributed as dist

        self._members = list(range(dist.get_world_size()) if members is None else members)
        self.rank = self._members.index(dist.get_rank()) if dist.get_rank() in self._members else -1
        self.world_size = len(self._members)
        self.local_rank = int(next(filter(None, map(os.environ.get, _LOCAL_RANK)), 0))
        # Beside a group that is bound to a device torch asks this one for it, and gloo names none but the CPU and CUDA.
        backend = "gloo" if (kind := devices.kind()) is None else f"cpu:gloo,{kind}:gloo"
        self.group: Any = dist.new_group(self._members, timeout=timeout, backend=backend)
        """The group; ``None`` once the channel is closed."""

    def gather(self, value: T) -> list[T]:
        import torch.distributed as dist

        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, value: T, root: int) -> T:
        import torch.distributed as dist

        values = [value]
        dist.broadcast_object_list(values, self._members[root], group=self.group)
        return values[0]

    def barrier(self) -> None:
        self.gather(None)

    def new_channel(self, timeout: timedelta | None = None) -> Ranks:
        return DistributedRanks(self._members, timeout)

    def subset(self, ranks: Sequence[int], timeout: timedelta | None = None) -> Ranks:
        return DistributedRanks(ranks, timeout)

    def close(self) -> None:
        import torch.distributed as dist

        group, self.group = self.group, None
        if group is not None and dist.is_initialized():
            with contextlib.suppress(ValueError):  # the program has destroyed all groups meanwhile, this one too
                dist.destroy_process_group(group)


def current_ranks() -> Ranks:
    """Return the ranks of this run: those of ``torch.distributed`` where it is initialised, else one."""
    return DistributedRanks() if current_world_size() > 1 else SingleProcess()


def current_world_size() -> int:
    """Return the number of processes of ``torch.distributed``; 1 where it is not initialised."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def run_on_all_ranks(
    ranks: Ranks, work: Callable[[], T], doing: str, failed: Callable[[Exception], ResumeError] | None = None
) -> list[T]:
    """Run ``work`` on every rank and return all results in rank order, or raise on every rank.

    Args:
        ranks: the ranks, all of which call this.
        work: must not communicate with other ranks: if it fails on one, the others would wait forever.
        doing: what it does, for the message on the other ranks.
        failed: turns an error of the framework or the system into one of this package; by default it is raised as is.

    Raises:
        PeerFailed: ``work`` failed on another rank; on that rank, its own error.
    """
    error: Exception | None = None
    result: T | None = None
    try:
        result = work()
    except ResumeError as refusal:
        error = refusal
    except Exception as cause:  # of any kind: the other ranks must learn of it before it is raised
        error = cause if failed is None else failed(cause)
        error.__cause__ = None if error is cause else cause
    answers = ranks.gather((result, None if error is None else str(error)))
    if error is not None:
        raise error
    for rank, (_, message) in enumerate(answers):
        if message is not None:
            raise PeerFailed(f"rank {rank} could not {doing}: {message}")
    return [cast("T", answer) for answer, _ in answers]
