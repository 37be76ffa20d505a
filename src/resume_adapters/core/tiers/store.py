"""The few operations that are needed of an object store. Keys are relative to the URL of the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from resume_adapters.core.storage.base import Bytes


class Store(Protocol):
    """An object store.

    Every method may raise :class:`~resume_adapters.errors.TierUnavailable`, after the store's client has tried again.

    Attributes:
        label: its URL.
    """

    @property
    def label(self) -> str: ...

    def put(self, key: str, content: bytes) -> None:
        """Create or replace an object."""

    def create(self, key: str, content: bytes) -> None:
        """Create an object, where no object has that key.

        Raises:
            FileExistsError: one has. A store that does not know the condition replaces it instead.
        """

    def put_parts(self, key: str, parts: Iterator[bytes], size: int) -> None:
        """Create an object from parts of so many bytes, but for the last. It exists once all are there."""

    def get(self, key: str) -> bytes:
        """Return the content of an object.

        Raises:
            FileNotFoundError: there is none.
        """

    def get_range(self, key: str, begin: int, end: int) -> Bytes:
        """Return the bytes of an object from one offset to another; fewer where a store or a proxy cuts them off.

        Raises:
            FileNotFoundError: there is none.
        """

    def list(self, prefix: str = "") -> dict[str, int]:
        """Return the sizes of the objects whose keys begin so, by key."""

    def size(self, key: str) -> int | None:
        """Return the size of an object; ``None`` if there is none."""

    def discard(self, keys: Sequence[str]) -> None:
        """Remove objects; those that are not there are removed."""
