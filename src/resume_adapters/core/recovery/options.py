"""What a user may set of a restartable block."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from resume_adapters.errors import UnsupportedSetting

Hook = Callable[[Any], object]
"""A function that is called with the attempt."""


@dataclass(frozen=True)
class BlockOptions:
    """How a block is run again.

    Attributes:
        max_restarts: how often, at most.
        meeting_timeout: seconds for which a rank waits for the others.
        grace: seconds in which a rank that has no failure of its own may reach the end of its step.
        hang_after: seconds without the end of a step after which a rank hangs; ``None``: measured.
        initialize: called before each attempt.
        abort: called on the watching thread, when the communication of an attempt that failed has been cut.
        finalize: called after it, when the attempt has been left.
        health_check: called before each attempt but the first; it raises where this process cannot go on.

    Raises:
        UnsupportedSetting: one of them is not what it must be.
    """

    max_restarts: int = 10
    meeting_timeout: float = 60.0
    grace: float = 10.0
    hang_after: float | None = None
    initialize: Hook | None = None
    abort: Hook | None = None
    finalize: Hook | None = None
    health_check: Hook | None = None

    def __post_init__(self) -> None:
        if isinstance(self.max_restarts, bool) or not isinstance(self.max_restarts, int) or self.max_restarts < 0:
            raise UnsupportedSetting(f"max_restarts={self.max_restarts!r}; expected a whole number, 0 or more")
        for name in ("meeting_timeout", "grace", "hang_after"):
            value = getattr(self, name)
            if name == "hang_after" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise UnsupportedSetting(f"{name}={value!r}; expected a positive number of seconds")
        for name in ("initialize", "abort", "finalize", "health_check"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise UnsupportedSetting(f"{name}={value!r}; expected a function that takes the attempt")


@dataclass(frozen=True)
class Launch:
    """The processes of a launch, as the launcher has said.

    Attributes:
        rank: the number of this process.
        world_size: the number of processes.
        is_one_node: all of them are on this node.
        host: where the launcher's store is; empty for a single process.
        port: its port.
        name: distinguishes the block from others that use the same store.
        start: distinguishes these processes from those of the launch that were started before, in the same places.
        local_rank: the number of this process among those of its node.
    """

    rank: int = 0
    world_size: int = 1
    is_one_node: bool = True
    host: str = ""
    port: int = 0
    name: str = ""
    start: str = "0"
    local_rank: int = 0


def read_launch(block: int, environment: Mapping[str, str] = os.environ) -> Launch:
    """Return how this process was launched.

    Args:
        block: the number of the block in this process.
        environment: what the launcher has set.

    Raises:
        UnsupportedSetting: as one of several, and not by torchrun, whose store outlives an attempt.
    """
    world_size = int(environment.get("WORLD_SIZE", "1"))
    if world_size == 1:
        return Launch(name=f"process {os.getpid()}/{block}")
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise UnsupportedSetting(
            f"a restartable block needs torchrun where there are several processes, and this is one of {world_size} "
            "that something else has started: torchrun keeps a store in which the ranks meet after a failure. Launch "
            "with torchrun, or leave @restartable out"
        )
    local = int(environment.get("LOCAL_WORLD_SIZE", world_size))
    return Launch(
        int(environment["RANK"]),
        world_size,
        local == world_size,
        environment["MASTER_ADDR"],
        int(environment["MASTER_PORT"]),
        f"{environment.get('TORCHELASTIC_RUN_ID', 'none')}/{block}",
        environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
        int(environment["LOCAL_RANK"]),
    )
