"""Run a training again, in the same processes, when it fails: :func:`restartable`.

What a rank holds at the end of its last step is what it goes on from. Nothing is read from a disk, no step is lost, and
the step that failed is done again, bit for bit. Where the ranks do not hold one state together, they resume from the
newest checkpoint, still without starting a process. Where a process dies, all of them end, and the launcher starts them
again: they resume from the newest checkpoint of memory and disk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from resume_adapters.core.recovery.attempt import Attempt
from resume_adapters.core.recovery.block import Block
from resume_adapters.core.recovery.options import BlockOptions, Hook
from resume_adapters.core.recovery.plan import Failure, Level

__all__ = ["Attempt", "Failure", "Level", "restartable"]

P = ParamSpec("P")
T = TypeVar("T")


def restartable(
    *,
    max_restarts: int = 10,
    meeting_timeout: float = 60.0,
    grace: float = 10.0,
    hang_after: float | None = None,
    initialize: Hook | None = None,
    abort: Hook | None = None,
    finalize: Hook | None = None,
    health_check: Hook | None = None,
) -> Callable[[Callable[Concatenate[Attempt, P], T]], Callable[P, T]]:
    """Make a function that is run again when it fails, on all ranks together. It builds all that it trains with.

    The function gets an :class:`Attempt` before its own arguments; it is called without. An adapter of this package
    that trains in it finds the attempt by itself. What the function does before and after the training is done again,
    with the random state that it had the first time.

    Args:
        max_restarts: how often the function is run again, at most, in these processes.
        meeting_timeout: seconds for which a rank waits for the others after a failure, and for each of the things that
            it does until the next attempt. Then its process ends, and the launcher starts all again.
        grace: seconds in which a rank without a failure may reach the end of its step, before it is interrupted.
        hang_after: seconds without the end of a step after which the ranks leave it: one hangs. By default ten times
            the slowest step so far, and at least five minutes. A rank whose main thread moves is slow, and waited for.
        initialize: called with the attempt before each of them.
        abort: called with the attempt when its communication has been cut, on any thread.
        finalize: called with the attempt that has failed, in the main thread.
        health_check: called with the next attempt; where it raises on any rank, all processes end.

    Raises:
        UnsupportedSetting: an argument is not what it must be; when the function is called: several processes were not
            started by torchrun, or a process group was made before.
        PeerFailed: a rank has died, or did not come in time: this process must end, and is ended after ``grace``.
    """
    options = BlockOptions(max_restarts, meeting_timeout, grace, hang_after, initialize, abort, finalize, health_check)

    def decorate(function: Callable[Concatenate[Attempt, P], T]) -> Callable[P, T]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            return Block(options).run(lambda attempt: function(attempt, *args, **kwargs))

        return run

    return decorate
