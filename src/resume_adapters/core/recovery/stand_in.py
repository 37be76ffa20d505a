"""A process that stands in for a rank whose process has died, while those that are left write what they hold.

A checkpoint is written by all ranks together, each with what is its own, and frameworks wait in it for each of them.
Weights, optimizer and schedules are alike on all ranks; so a rank that is left forks a process, which has them all
without a copy, gives it what the dead rank has kept of its own, and lets it take part as that rank.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess

from resume_adapters.core.recovery import forked


def assigned(lost: Sequence[int], world_size: int, rank: int) -> list[int]:
    """Return for which ranks a rank lets a process stand in.

    Args:
        lost: the ranks whose process has died.
        world_size: the number of ranks.
        rank: a rank that is left.
    """
    left = [each for each in range(world_size) if each not in lost]
    return [each for number, each in enumerate(lost) if left[number % len(left)] == rank]


def start_stand_in(rank: int, work: Callable[[], object]) -> BaseProcess:
    """Fork a process that is another rank, and does the work of that rank.

    Args:
        rank: the rank.
        work: what it does.
    """
    process = multiprocessing.get_context("fork").Process(
        target=_stand_in, args=(rank, os.getpid(), work), name=f"stand-in for rank {rank}"
    )
    process.start()
    return process


def _stand_in(rank: int, parent: int, work: Callable[[], object]) -> None:
    import torch

    forked.end_with(parent)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    gc.freeze()  # what another process has made is not collected here
    torch.set_num_threads(1)  # the threads of the pool have not come along
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    work()
