"""A repository of the Hugging Face Hub as a store, by huggingface_hub: ``hf://OWNER/NAME/runs/a``.

The Hub limits how many commits an account makes in an hour. So the files of a checkpoint are uploaded one by one, and
become visible in one commit with its manifest.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LimitReached
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from resume_adapters.core.storage.base import Bytes
from resume_adapters.core.tiers.object_store import hide_secrets, read_parts
from resume_adapters.core.tiers.options import hub_place, require_url
from resume_adapters.errors import CheckpointDamaged, MissingFramework, ResumeError, TierUnavailable

T = TypeVar("T")

_LARGEST_IN_MEMORY = 8 << 20
"""Bytes of a file that is uploaded from memory."""

_PART = 32 << 20
"""Bytes of a large file that one request reads: the Hub counts requests."""

_SLOWEST = 256 << 10
"""Bytes in a second below which an upload is given up."""

_ATTEMPTS = 5
"""How often a claim is tried while others commit to the repository."""

_ANSWER = 30.0
"""Seconds without a byte after which a download is tried again."""


class HubStore:
    """The files below a path in a repository of the Hub; the methods are those of ``ObjectStore``.

    What :meth:`put_pieces` was given is stored by the next :meth:`put` below the same place, or by :meth:`flush`.

    Args:
        url: the URL; the client finds the token, and the Hub, as ever.
        retry: how long a request may take; one that uploads has longer.
        makes: make the repository where it does not exist, a private one.

    Attributes:
        label: the URL.

    Raises:
        MissingFramework: huggingface_hub is not installed.
    """

    def __init__(self, url: str, retry: timedelta, *, makes: bool = False) -> None:
        require_url(url)
        try:
            import huggingface_hub
            from huggingface_hub import errors
        except ImportError as error:
            raise MissingFramework(f"{url} needs huggingface_hub: pip install 'huggingface_hub>=0.34'") from error
        self.label = url.rstrip("/")
        self._hub: Any = huggingface_hub
        self._errors: Any = errors
        # What the client's own client raises is no OSError since version 1; it is a base of what the Hub answers.
        self._translated: tuple[type[BaseException], ...]
        self._translated = (*errors.HfHubHTTPError.__bases__, OSError, RuntimeError, ValueError, LimitReached)
        kind, self._repository, folder = hub_place(url)
        self._folder = folder and f"{folder}/"
        self._where = {"repo_id": self._repository, "repo_type": kind}
        self._api: Any = huggingface_hub.HfApi()
        self._retry = retry.total_seconds()
        self._makes = makes
        self._staged: dict[str, Any] = {}

    def put(self, key: str, content: bytes) -> None:
        place = _place(key)
        staged = [self._staged.pop(each) for each in [*self._staged] if _place(each) == place]
        self._request("write", key, lambda: self._commit(key, [*staged, self._uploaded(key, content)]))

    def create(self, key: str, content: bytes) -> None:
        def add() -> None:
            for left in reversed(range(_ATTEMPTS)):
                head = self._api.repo_info(**self._where).sha
                if self._api.get_paths_info(**self._where, paths=[self._folder + key], revision=head):
                    raise FileExistsError(key)
                try:
                    return self._commit(key, [self._uploaded(key, content)], parent_commit=head)
                except self._errors.HfHubHTTPError as error:
                    if error.response.status_code != 412 or not left:  # somebody has committed meanwhile
                        raise
            return None

        self._request("write", key, add)

    def put_pieces(self, key: str, pieces: Iterator[bytes], size: int, file: Path) -> None:
        """Upload a file. The client reads large ones itself, after the pieces: it needs their digest beforehand."""
        if any(_place(each) != _place(key) for each in self._staged):
            self._staged.clear()  # of a copy that was given up
        content: bytes | str = b"".join(pieces) if size <= _LARGEST_IN_MEMORY else str(file)
        for _ in pieces:  # to its end, which raises where the file is not what its manifest says
            pass
        self._staged[key] = self._request("write", key, lambda: self._uploaded(key, content), size)

    def flush(self) -> None:
        staged, self._staged = self._staged, {}
        if staged:
            key = next(iter(staged))
            self._request("write", key, lambda: self._commit(key, [*staged.values()]))

    def get(self, key: str, most: int) -> bytes:
        def read() -> bytes:
            found = self._api.get_paths_info(**self._where, paths=[self._folder + key])
            if not found or not hasattr(found[0], "size"):
                raise FileNotFoundError(key)
            if found[0].size > most:
                raise CheckpointDamaged(f"{key} has {found[0].size} bytes; expected at most {most}")
            return self._download(key, 0, found[0].size)

        return self._request("read", key, read)

    def get_pieces(self, key: str, size: int) -> Iterator[Bytes]:
        return read_parts(key, size, self.get, self._get_range, _PART)

    def _get_range(self, key: str, begin: int, end: int) -> memoryview:
        return memoryview(self._request("read", key, lambda: self._download(key, begin, end)))

    def list(self, prefix: str = "") -> dict[str, int]:
        try:
            there = self._request("list", prefix, lambda: self._tree(prefix))
        except FileNotFoundError:  # a folder without files is none
            there = {}
        staged = {key: each.upload_info.size for key, each in self._staged.items() if key.startswith(prefix)}
        return {**there, **staged}

    def discard(self, keys: Sequence[str]) -> None:
        """Remove files in one commit. The history has them still, and the Hub counts them."""

        def remove() -> None:
            there = self._tree("")
            gone = [self._hub.CommitOperationDelete(self._folder + key) for key in keys if key in there]
            if gone:
                self._commit(keys[0], gone)

        self._request("remove", keys[0] if keys else "", remove)

    def _uploaded(self, key: str, content: bytes | str) -> Any:
        """Upload what is large, and return what a commit needs; a ``.gitignore`` of the repository is not obeyed."""
        addition = self._hub.CommitOperationAdd(self._folder + key, content)
        with self._quiet():
            self._api.preupload_lfs_files(**self._where, additions=[addition], gitignore_content="")
        return addition

    @contextlib.contextmanager
    def _quiet(self) -> Iterator[None]:
        """Draw no progress bars across those of the training, in the whole process for so long."""
        utils = self._hub.utils
        if utils.are_progress_bars_disabled():
            yield
            return
        utils.disable_progress_bars()
        try:
            yield
        finally:
            utils.enable_progress_bars()

    def _commit(self, key: str, operations: Sequence[Any], **options: Any) -> None:
        message = f"resume-adapters: {_place(key)}"
        self._api.create_commit(**self._where, operations=operations, commit_message=message, **options)

    def _tree(self, prefix: str) -> dict[str, int]:
        folder = (self._folder + prefix).rstrip("/") or None
        found = self._api.list_repo_tree(**self._where, path_in_repo=folder, recursive=True)
        return {each.path.removeprefix(self._folder): each.size for each in found if hasattr(each, "size")}

    def _download(self, key: str, begin: int, end: int) -> bytes:
        if begin == end:
            return b""
        utils, path = self._hub.utils, self._folder + key
        url = self._hub.hf_hub_url(filename=path, endpoint=self._api.endpoint, **self._where)
        headers = {**utils.build_hf_headers(), "Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
        answer = utils.http_backoff("GET", url, headers=headers, timeout=min(_ANSWER, self._retry))
        utils.hf_raise_for_status(answer)
        content = bytes(answer.content)
        return content[: end - begin] if answer.status_code == 206 else content[begin:end]

    def _made(self, work: Callable[[], T]) -> T:
        """Return what a request returns, and make the repository first if that is what is missing."""
        try:
            return work()
        except self._errors.RepositoryNotFoundError:
            if not self._makes:
                raise
            # The Hub says the same of one that the token may not see: then the request fails again.
            self._api.create_repo(**self._where, private=True, exist_ok=True)
            return work()

    def _request(self, doing: str, key: str, work: Callable[[], T], size: int = 0) -> T:
        """Return what a request returns, in the time that it may take; translate what the client raises."""
        try:
            return _within(self._retry + size / _SLOWEST, lambda: self._made(work))
        except (FileNotFoundError, FileExistsError, ResumeError):
            raise
        except self._errors.EntryNotFoundError:
            raise FileNotFoundError(key) from None
        except self._translated as error:
            cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
            lines = [*str(cause).split("\n"), getattr(cause, "server_message", None) or "", type(cause).__name__]
            first, *_ = filter(None, lines)
            said = first if lines[-2] in first else f"{first} ({lines[-2]})"
            if isinstance(cause, LimitReached):
                said = f"no answer in {self._retry + size / _SLOWEST:.0f} s"
            raise TierUnavailable(
                f"could not {doing} {self.label}/{key}: {hide_secrets(said, os.environ)}. Check that the Hub can be "
                "reached, and that the token (HF_TOKEN, or `hf auth login`) may write to the repository"
            ) from None


def _place(key: str) -> str:
    """Return what of a key names one copy of a checkpoint."""
    return "/".join(key.split("/")[:2])


def _within(seconds: float, work: Callable[[], T]) -> T:
    """Return what ``work`` returns. Most requests of the client wait for ever, and what hangs is left behind."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(work())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name="resume-adapters-hub", daemon=True).start()
    return answer.result(seconds)
