"""The few operations that are needed of an object store. Keys are relative to the URL of the run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from resume_adapters.core.storage.base import Bytes
from resume_adapters.errors import TierUnavailable


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


_SECRET = re.compile(r"KEY|SECRET|TOKEN|PASSWORD|SAS|CREDENTIAL")
"""What the names of environment variables have whose values are not to be shown."""

_SIGNED = re.compile(r"[?&][^\s\"'>]*(?:sig|Signature|Credential|Token)=[^\s\"'>]*", re.IGNORECASE)

_USER = re.compile(r"://[^/\s@]+@")
"""The user and the password in a URL, such as that of a proxy."""


class Secrets:
    """The credentials in the environment.

    Args:
        environment: the environment variables.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._hidden = sorted(
            (value for name, value in environment.items() if _SECRET.search(name.upper()) and len(value) >= 6),
            key=len,
            reverse=True,
        )

    def hide(self, text: str) -> str:
        """Return the first line of a message, without credentials and signatures."""
        line = _USER.sub("://***@", _SIGNED.sub("", text.partition("\n")[0]))
        for value in self._hidden:
            line = line.replace(value, "***")
        return line[:300].rstrip(". ")

    def unavailable(self, doing: str, where: str, error: Exception) -> TierUnavailable:
        """Return what to raise for a request that failed.

        The client's own message may show how a request was signed: of it only the first line is kept, without
        credentials. So raise it ``from None``.

        Args:
            doing: the request, as a verb.
            where: the URL of the object, or of the store.
            error: what the client has raised.
        """
        return TierUnavailable(
            f"could not {doing} {where.rstrip('/')}: {self.hide(str(error) or type(error).__name__)}. Check that the "
            "store can be reached, and that the credentials in the environment may do so"
        )
