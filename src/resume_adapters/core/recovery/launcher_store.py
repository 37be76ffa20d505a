"""The store that torchrun keeps, which outlives the processes of a launch."""

from __future__ import annotations

import datetime
from typing import Any

from resume_adapters.core.recovery.options import Launch


def connected(launch: Launch, timeout: float) -> Any:
    """Return a connection to the store, which is waited for as many seconds."""
    from torch._C._distributed_c10d import TCPStore  # seam: torch 2.6-2.13

    return TCPStore(launch.host, launch.port, None, False, datetime.timedelta(seconds=timeout))


def below(store: Any, launch: Launch, name: str) -> Any:
    """Return the part of a store that belongs to one start of a launch, under a name."""
    from torch._C._distributed_c10d import PrefixStore  # seam: torch 2.6-2.13

    return PrefixStore(f"resume_adapters/{launch.name}/{launch.start}/{name}", store)
