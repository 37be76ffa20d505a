"""Object stores with faults, for the tests of tiers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from resume_adapters.core.tiers import mirrors, object_store
from resume_adapters.core.tiers.hub import HubStore
from resume_adapters.core.tiers.object_store import ObjectStore
from resume_adapters.core.tiers.options import is_hub
from resume_adapters.errors import TierUnavailable


def forget_settings(patch: pytest.MonkeyPatch) -> None:
    """Remove what the environment of the tests says of stores, and of proxies on the way to them."""
    for name in [*os.environ]:
        if name.startswith("AWS_") or name.lower().endswith("_proxy"):
            patch.delenv(name)


def retry_soon(patch: pytest.MonkeyPatch) -> None:
    """Let copies that have failed be tried again at once."""
    for longest in ("_LONGEST_PAUSE", "_LONGEST_LAST_PAUSE"):
        patch.setattr(mirrors, longest, 0.05)


def open_store(url: str) -> ObjectStore | HubStore:
    """Return the store at a URL."""
    if is_hub(url):
        return HubStore(url, timedelta(seconds=60), makes=True)
    return ObjectStore(url, timedelta(seconds=5))


class FaultyStore:
    """A store with faults, each of which a test sets.

    Attributes:
        before: is called before each request that changes something, with its number from 0 and the key.
        down: every request fails.
        lies: it overwrites what it is asked to create only.
        refuses: what returns whether an object cannot be read.
        hides: what returns whether a listing leaves a key out.
        cuts: how many bytes of the framework's files are missing at the end, where they are read.
    """

    def __init__(self, url: str) -> None:
        self._store = open_store(url)
        self.before: Callable[[int, str], object] = lambda number, key: None
        self.down = self.lies = False
        self.refuses: Callable[[str], bool] = lambda key: False
        self.hides: Callable[[str], bool] = lambda key: False
        self.cuts = 0
        self.requests = 0

    @property
    def label(self) -> str:
        return self._store.label

    def _change(self, key: str) -> None:
        self._ask()
        number, self.requests = self.requests, self.requests + 1
        self.before(number, key)

    def _ask(self, key: str = "") -> None:
        if self.down:
            raise TierUnavailable(f"could not reach {self.label}: it is down")
        if self.refuses(key):
            raise TierUnavailable(f"could not read {self.label}/{key}: access is denied")

    def put(self, key: str, content: bytes) -> None:
        self._change(key)
        self._store.put(key, content)

    def create(self, key: str, content: bytes) -> None:
        self._change(key)
        (self._store.put if self.lies else self._store.create)(key, content)

    def put_pieces(self, key: str, pieces: Iterator[bytes], size: int, file: Path) -> None:
        if size <= object_store.PART and not is_hub(self.label):
            self.put(key, b"".join(pieces))
        else:
            self._change(key)
            self._store.put_pieces(key, pieces, size, file)

    def flush(self) -> None:
        self._store.flush()

    def get(self, key: str, most: int = 1 << 30) -> bytes:
        self._ask(key)
        found = self._store.get(key, most)
        return found[: len(found) - self.cuts] if key.endswith("model.bin") else found

    get_pieces = ObjectStore.get_pieces

    def _get_range(self, key: str, begin: int, end: int) -> memoryview:
        self._ask(key)
        found = self._store._get_range(key, begin, end)
        return found[: len(found) - self.cuts]

    def list(self, prefix: str = "") -> dict[str, int]:
        self._ask()
        return {key: size for key, size in self._store.list(prefix).items() if not self.hides(key)}

    def discard(self, keys: Any) -> None:
        for key in keys:
            self._change(key)
            self._store.discard([key])
