"""A :class:`~resume_adapters.core.tiers.store.Store` by fsspec, for the schemes that obstore does not know.

None of fsspec's file systems creates what does not exist, and nothing else, in one step. So each is used as a store
that overwrites; a start says so.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from resume_adapters.core.tiers.options import require_url
from resume_adapters.core.tiers.secrets import Secrets
from resume_adapters.errors import MissingFramework, ResumeError, UnsupportedSetting


class FileSystemStore:
    """The files below a URL.

    Args:
        url: the URL; credentials come from the environment, as the file system finds them.
        environment: the environment variables.

    Raises:
        MissingFramework: what the scheme needs is not installed.
        UnsupportedSetting: fsspec does not know the scheme.
    """

    def __init__(self, url: str, environment: Mapping[str, str] = os.environ) -> None:
        require_url(url)
        self._label = url.rstrip("/")
        self._secrets = Secrets(environment)
        self._made: set[str] = set()
        self._remote, self._root = self._open(url)

    def _open(self, url: str) -> tuple[Any, str]:
        scheme = url.partition(":")[0]
        from fsspec.core import get_filesystem_class, url_to_fs  # type: ignore[import-untyped]

        try:
            get_filesystem_class(scheme)
        except ValueError:
            raise UnsupportedSetting(
                f"{url}: unknown scheme; expected s3, gs, az, file, or one that fsspec knows"
            ) from None
        except ImportError as error:
            raise MissingFramework(f"{url} needs a package for fsspec: {error}") from error
        with self._translated("open"):
            files, root = url_to_fs(url)
        return files, root.rstrip("/")

    @property
    def label(self) -> str:
        return self._label

    def put(self, key: str, content: bytes) -> None:
        self.put_parts(key, iter([content]), len(content))

    def create(self, key: str, content: bytes) -> None:
        self.put(key, content)

    def put_parts(self, key: str, parts: Iterator[bytes], size: int) -> None:
        path = f"{self._root}/{key}"
        with self._translated("write", key):
            parent = path.rpartition("/")[0]
            if parent not in self._made:
                self._remote.makedirs(parent, exist_ok=True)
                self._made.add(parent)
            # What is cut off is a file without a manifest, and shorter than that would say.
            with self._remote.open(path, "wb") as file:
                for part in parts:
                    file.write(part)

    def get(self, key: str) -> bytes:
        with self._translated("read", key):
            return bytes(self._remote.cat_file(f"{self._root}/{key}"))

    def get_range(self, key: str, begin: int, end: int) -> bytes:
        with self._translated("read", key):
            return bytes(self._remote.cat_file(f"{self._root}/{key}", start=begin, end=end))

    def list(self, prefix: str = "") -> dict[str, int]:
        directory = f"{self._root}/{prefix.rpartition('/')[0]}".rstrip("/")
        with self._translated("list", prefix):
            self._remote.invalidate_cache()
            try:
                found = self._remote.find(directory, detail=True)
            except FileNotFoundError:
                return {}
        keys = {path.partition(f"{self._root.lstrip('/')}/")[2]: each["size"] for path, each in found.items()}
        return {key: int(size) for key, size in keys.items() if key.startswith(prefix)}

    def size(self, key: str) -> int | None:
        with self._translated("look at", key), contextlib.suppress(FileNotFoundError):
            self._remote.invalidate_cache()
            return int(self._remote.info(f"{self._root}/{key}")["size"])
        return None

    def discard(self, keys: Sequence[str]) -> None:
        for key in keys:
            with self._translated("remove", key), contextlib.suppress(FileNotFoundError):
                self._remote.rm_file(f"{self._root}/{key}")

    @contextlib.contextmanager
    def _translated(self, doing: str, key: str = "") -> Iterator[None]:
        """Translate what a file system raises, each its own.

        Raises:
            TierUnavailable: see :meth:`Secrets.unavailable`.
        """
        try:
            yield
        except (FileNotFoundError, ResumeError):
            raise
        except Exception as error:
            raise self._secrets.unavailable(doing, f"{self._label}/{key}", error) from None
