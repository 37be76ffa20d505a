"""The store that torchrun keeps, which outlives the processes of a launch. No call waits without a limit."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator, Sequence
from typing import Any

from resume_adapters.core.recovery.options import Launch
from resume_adapters.errors import PeerFailed

_GONE = (
    "the store of torchrun cannot be reached: torchrun has ended, or its machine is gone. Launch the same command "
    "again: it resumes from the newest checkpoint"
)


class LauncherStore:
    """A connection to the store; one thread at a time uses it.

    Args:
        launch: the processes of the launch.
        seconds: the limit for each call.

    Raises:
        PeerFailed: the store cannot be reached; also by each method.
    """

    def __init__(self, launch: Launch, seconds: float) -> None:
        from torch._C._distributed_c10d import TCPStore  # seam: torch 2.6-2.13

        with _reaching():
            self.native: Any = TCPStore(
                launch.host, launch.port, None, False, datetime.timedelta(seconds=seconds), wait_for_workers=False
            )

    def below(self, *names: str) -> LauncherStore:
        """Return a part of the store, on the same connection."""
        from torch._C._distributed_c10d import PrefixStore  # seam: torch 2.6-2.13

        part = object.__new__(LauncherStore)
        part.native = PrefixStore("/".join(("resume_adapters", *names)), self.native)
        return part

    def set(self, key: str, value: bytes | str) -> None:
        """Write a value."""
        with _reaching():
            self.native.set(key, value)

    def add(self, key: str, number: int) -> int:
        """Add to a number, and return it."""
        with _reaching():
            return int(self.native.add(key, number))

    def has(self, keys: Sequence[str]) -> bool:
        """Return whether all keys have values."""
        with _reaching():
            return bool(self.native.check(list(keys)))

    def read(self, key: str) -> bytes | None:
        """Return a value; ``None`` where there is none yet. Nothing here is deleted, so it never waits for one."""
        with _reaching():
            return bytes(self.native.get(key)) if self.native.check([key]) else None

    def replace(self, key: str, expected: str, value: str) -> str:
        """Write a value if another one is there (empty: none), and return what is there then."""
        with _reaching():
            return str(self.native.compare_set(key, expected, value).decode())


@contextlib.contextmanager
def _reaching() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch's DistNetworkError and its kin
        raise PeerFailed(_GONE) from error
