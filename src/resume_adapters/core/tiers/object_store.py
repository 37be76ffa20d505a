"""The few operations that are needed of an object store, by obstore: S3 and what is compatible, GCS, Azure, and others.

Keys are relative to the URL of the run.
"""

from __future__ import annotations

import contextlib
import os
import re
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

from resume_adapters.core.storage.base import Bytes, Storage
from resume_adapters.core.storage.local import LocalStorage
from resume_adapters.core.tiers.options import require_url
from resume_adapters.errors import CheckpointDamaged, MissingFramework, ResumeError, TierUnavailable

PART = 8 << 20
"""Bytes of a part of a large object, and at most of one that goes as a whole; very large ones have larger parts. Memory
of more than 32 MB would be mapped and cleared each time."""

_MOST_PARTS = 9000
"""Parts of an object; stores allow 10,000."""

IN_FLIGHT = 128 << 20
"""Bytes of the parts on their way, at most."""

_READS_AT_ONCE = 8

_RETRIES = 8
"""How often a request is tried again, at growing intervals with jitter."""

_LONGEST_REQUEST, _LONGEST_CONNECT = timedelta(minutes=5), timedelta(seconds=10)

_ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT")
"""Where the address of a store may be that is not Amazon's; one that begins with http: is meant so."""

_MEMORY: dict[str, Any] = {}
"""The stores of ``memory://``, by URL: all that open one in this process meet there."""


class ObjectStore:
    """The objects below a URL.

    Every method may raise :class:`TierUnavailable`, after the client has tried again.

    Args:
        url: the URL; credentials come from the environment.
        retry: how long a request is tried again.
        environment: the environment variables.

    Attributes:
        label: the URL.

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
            raise MissingFramework(f"{url} needs obstore: pip install 'obstore>=0.8'") from error
        self.label = url.rstrip("/")
        self._api: Any = obstore
        self._environment = environment
        parts = urllib.parse.urlsplit(url)
        # The client follows links out of a store that is a directory, and waits for ever on a pipe.
        self._root = Path(urllib.parse.unquote(parts.path)) if parts.scheme == "file" else None
        self._storage = LocalStorage()
        with self._translated("open"):
            self._store = _open(url, retry, environment)

    def put(self, key: str, content: bytes) -> None:
        """Create or replace an object."""
        with self._translated("write", key):
            self._api.put(self._store, key, content, use_multipart=False)

    def create(self, key: str, content: bytes) -> None:
        """Create an object, where no object has that key.

        Raises:
            FileExistsError: one has. A store that does not know the condition replaces it instead.
        """
        with self._translated("write", key):
            self._api.put(self._store, key, content, mode="create", use_multipart=False)

    def put_pieces(self, key: str, pieces: Iterator[bytes], size: int, file: Path) -> None:
        """Create or replace an object from the pieces of a file, which have so many bytes together.

        It exists once all are there. Where they raise, the store is told to forget what it has got of them.
        """
        if size <= PART:
            self.put(key, b"".join(pieces))
            return
        part = PART * -(-size // (PART * _MOST_PARTS))
        with self._translated("write", key):
            self._api.put(self._store, key, pieces, chunk_size=part, max_concurrency=max(1, IN_FLIGHT // part))

    def flush(self) -> None:
        """Store what :meth:`put_pieces` was given: that is done already."""

    def get(self, key: str, most: int) -> bytes:
        """Return the content of a small object.

        Raises:
            FileNotFoundError: there is none.
            CheckpointDamaged: it has more than ``most`` bytes; it is not read.
        """
        with self._translated("read", key):
            found = self._api.get(self._store, key)
            if found.meta["size"] > most:
                raise CheckpointDamaged(f"{key} has {found.meta['size']} bytes; expected at most {most}")
            return bytes(found.bytes())

    def get_pieces(self, key: str, size: int) -> Iterator[Bytes]:
        """Yield the content of an object of a known size; of a large one, parts are read in parallel.

        What a store or a proxy has cut off is not noticed here: the digest of the content tells.

        Raises:
            CheckpointDamaged: there is none, or it is small and has more bytes.
        """
        return read_parts(key, size, self.get, self._get_range, PART)

    def _get_range(self, key: str, begin: int, end: int) -> memoryview:
        with self._translated("read", key):
            return memoryview(self._api.get_range(self._store, key, start=begin, end=end))

    def list(self, prefix: str = "") -> dict[str, int]:
        """Return the sizes of the objects whose keys begin so, by key."""
        with self._translated("list", prefix):
            if self._root is not None:
                return dict(_files(self._storage, self._root, prefix.rstrip("/")))
            found = [each for batch in self._api.list(self._store, prefix or None) for each in batch]
        return {str(each["path"]): int(each["size"]) for each in found}

    def discard(self, keys: Sequence[str]) -> None:
        """Remove objects, the first one first; those that are not there are removed."""
        with self._translated("remove", keys[0] if keys else ""):
            for key in keys:
                self._require_within(key)
            for some in filter(None, (keys[:1], keys[1:])):
                try:
                    self._api.delete(self._store, list(some))
                except FileNotFoundError:  # some stores say so, and then the rest is still there
                    for key in some:
                        with contextlib.suppress(FileNotFoundError):
                            self._api.delete(self._store, key)

    def _require_within(self, key: str) -> None:
        """Raise if a key of a store that is a directory leads through a link, or to a pipe or a device."""
        if self._root is None:
            return
        path, storage = self._root, self._storage
        for name in filter(None, key.split("/")):
            path = path / name
            is_known = storage.is_file(path) or storage.is_directory(path) or not storage.exists(path)
            if storage.is_link(path) or not is_known:
                raise TierUnavailable(
                    f"{path} is a link, a pipe or a device: nothing is read or written there, since it may lead out of "
                    "the store. Remove it"
                )

    @contextlib.contextmanager
    def _translated(self, doing: str, key: str = "") -> Iterator[None]:
        """Translate what the client raises.

        Its own message may show how a request was signed: it is hidden, and so is where it was raised.
        """
        self._require_within(key)
        try:
            yield
        except (FileNotFoundError, FileExistsError, ResumeError):
            raise
        except self._api.exceptions.AlreadyExistsError:
            raise FileExistsError(key) from None
        except (self._api.exceptions.BaseError, OSError, ValueError, NotImplementedError) as error:
            where = f"{self.label}/{key}".rstrip("/")
            said = hide_secrets(str(error) or type(error).__name__, self._environment)
            raise TierUnavailable(
                f"could not {doing} {where}: {said}. Check that the store can be reached, and that the credentials in "
                "the environment may do so"
            ) from None


def read_parts(
    key: str, size: int, get: Callable[[str, int], bytes], get_range: Callable[[str, int, int], Bytes], part: int
) -> Iterator[Bytes]:
    """Yield the content of an object of a known size; of one that is larger than a part, parts are read in parallel.

    Raises:
        CheckpointDamaged: there is none, or it is small and has more bytes.
    """
    try:
        if size <= part:  # without a range: some stores answer one of all bytes with the wrong status
            yield get(key, size)
            return
        with ThreadPoolExecutor(_READS_AT_ONCE, thread_name_prefix="resume-adapters-download") as pool:
            for begin in range(0, size, part * _READS_AT_ONCE):
                ends = range(begin, min(begin + part * _READS_AT_ONCE, size), part)
                yield from pool.map(lambda at: get_range(key, at, min(at + part, size)), ends)
    except FileNotFoundError:
        raise CheckpointDamaged(f"{key} is missing") from None


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


def _files(storage: Storage, root: Path, prefix: str) -> Iterator[tuple[str, int]]:
    """Yield the key and the size of each regular file of a store that is a directory; no link is followed."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # it is gone meanwhile
        for entry in storage.entries(root / prefix):
            key = f"{prefix}/{entry.name}".lstrip("/")
            if entry.kind == "directory":
                yield from _files(storage, root, key)
            elif entry.kind == "file" and not _PARTIAL.fullmatch(entry.name):
                with contextlib.suppress(FileNotFoundError):
                    yield key, storage.size(root / key)


_PARTIAL = re.compile(r".*#\d+", re.DOTALL)
"""The name under which the client writes a file."""

_SECRET = re.compile(r"KEY|SECRET|TOKEN|PASSWORD|SAS|CREDENTIAL")
"""What the names of environment variables have whose values are not to be shown."""

_SIGNED = re.compile(r"[?&][^\s\"'>]*(?:sig|Signature|Credential|Token)=[^\s\"'>]*", re.IGNORECASE)

_USER = re.compile(r"://[^/\s@]+@")
"""The user and the password in a URL, such as that of a proxy."""


def hide_secrets(text: str, environment: Mapping[str, str]) -> str:
    """Return the first line of a message, without signatures and the credentials in the environment."""
    line = _USER.sub("://***@", _SIGNED.sub("", text.partition("\n")[0]))
    hidden = [value for name, value in environment.items() if _SECRET.search(name.upper()) and len(value) >= 6]
    for value in sorted(hidden, key=len, reverse=True):
        line = line.replace(value, "***")
    return line[:300].rstrip(". ")
