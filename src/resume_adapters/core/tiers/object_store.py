"""A :class:`~resume_adapters.core.tiers.store.Store` by obstore: S3 and what is compatible, GCS, Azure, and others."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

from resume_adapters.core.tiers.options import require_url
from resume_adapters.core.tiers.store import Secrets
from resume_adapters.core.tiers.transfer import IN_FLIGHT
from resume_adapters.errors import MissingFramework, ResumeError

_RETRIES = 8
"""How often a request is tried again, at growing intervals with jitter."""

_LONGEST_REQUEST, _LONGEST_CONNECT = timedelta(minutes=5), timedelta(seconds=10)

_ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT")
"""Where the address of a store may be that is not Amazon's; one that begins with http: is meant so."""

_MEMORY: dict[str, Any] = {}
"""The stores of ``memory://``, by URL: all that open one in this process meet there."""


class ObjectStore:
    """The objects below a URL.

    Args:
        url: the URL; credentials come from the environment.
        retry: how long a request is tried again.
        environment: the environment variables.

    Raises:
        MissingFramework: obstore is not installed.
        TierUnavailable: the environment has a setting that it does not know.
    """

    def __init__(self, url: str, retry: timedelta, environment: Mapping[str, str] = os.environ) -> None:
        require_url(url)
        try:
            import obstore
            import obstore.store
        except ImportError as error:
            raise MissingFramework(f"{url} needs obstore: pip install 'resume-adapters[remote]'") from error
        self._api: Any = obstore
        self._label = url.rstrip("/")
        self._secrets = Secrets(environment)
        with self._translated("open"):
            self._store = _open(url, retry, environment)

    @property
    def label(self) -> str:
        return self._label

    def put(self, key: str, content: bytes) -> None:
        with self._translated("write", key):
            self._api.put(self._store, key, content, use_multipart=False)

    def create(self, key: str, content: bytes) -> None:
        with self._translated("write", key):
            self._api.put(self._store, key, content, mode="create", use_multipart=False)

    def put_parts(self, key: str, parts: Iterator[bytes], size: int) -> None:
        with self._translated("write", key):
            self._api.put(self._store, key, parts, chunk_size=size, max_concurrency=max(1, IN_FLIGHT // size))

    def get(self, key: str) -> bytes:
        with self._translated("read", key):
            return bytes(self._api.get(self._store, key).bytes())

    def get_range(self, key: str, begin: int, end: int) -> memoryview:
        with self._translated("read", key):
            return memoryview(self._api.get_range(self._store, key, start=begin, end=end))

    def list(self, prefix: str = "") -> dict[str, int]:
        with self._translated("list", prefix):
            found = [each for batch in self._api.list(self._store, prefix or None) for each in batch]
        return {str(each["path"]): int(each["size"]) for each in found}

    def size(self, key: str) -> int | None:
        with self._translated("look at", key), contextlib.suppress(FileNotFoundError):
            return int(self._api.head(self._store, key)["size"])
        return None

    def discard(self, keys: Sequence[str]) -> None:
        with self._translated("remove", keys[0] if keys else ""):
            try:
                self._api.delete(self._store, list(keys))
            except FileNotFoundError:  # some stores say so, and then the rest is still there
                for key in keys:
                    with contextlib.suppress(FileNotFoundError):
                        self._api.delete(self._store, key)

    @contextlib.contextmanager
    def _translated(self, doing: str, key: str = "") -> Iterator[None]:
        """Translate what the client raises.

        Raises:
            TierUnavailable: see :meth:`Secrets.unavailable`.
        """
        try:
            yield
        except (FileNotFoundError, FileExistsError, ResumeError):
            raise
        except self._api.exceptions.AlreadyExistsError:
            raise FileExistsError(key) from None
        except (self._api.exceptions.BaseError, OSError, ValueError, NotImplementedError) as error:
            raise self._secrets.unavailable(doing, f"{self._label}/{key}", error) from None


def _open(url: str, retry: timedelta, environment: Mapping[str, str]) -> Any:
    """Return the client's own object for a URL."""
    from obstore.store import MemoryStore, from_url

    scheme = url.partition(":")[0].lower()
    if scheme == "memory":
        return _MEMORY.setdefault(url.rstrip("/"), MemoryStore())
    if scheme == "file":
        return from_url(url, mkdir=True)
    plain = any(environment.get(name, "").startswith("http://") for name in _ENDPOINTS)
    longest = min(retry, _LONGEST_REQUEST)
    return from_url(
        url,
        client_options={"timeout": longest, "connect_timeout": min(longest, _LONGEST_CONNECT), "allow_http": plain},
        retry_config={"max_retries": _RETRIES, "retry_timeout": longest},
    )
