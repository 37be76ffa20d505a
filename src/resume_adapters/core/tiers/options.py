"""What a user writes to have checkpoints copied beyond the run directory. Imports nothing that a copy needs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal
from urllib.parse import urlsplit

from resume_adapters.core.checkpoint.retention import Policy
from resume_adapters.core.requirements import require_type
from resume_adapters.errors import UnsupportedSetting

SCHEMES = frozenset({"s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl", "file", "memory"})
"""The schemes of URLs that obstore writes to."""

_HUB = re.compile(r"hf://(datasets/)?(?!(?:datasets|models|spaces)/)([\w.-]+/(?:[\w.-]|\{run\})+)(?:/(.*))?")
"""The URL of a repository of the Hugging Face Hub: the kind, the repository, and the folder in it."""

OnBehind = Literal["warn", "stop"]
"""What a run does whose copies do not arrive."""


@dataclass(frozen=True)
class Remote:
    """Copies committed checkpoints to an object store, in the background.

    A start with an empty run directory resumes from there. Credentials come from the environment and the instance, as
    the store's own clients find them; they do not belong into the URL.

    Args:
        url: where the copies go: ``s3://bucket/runs/a``, ``gs://``, ``az://``, ``hf://``, ``file://`` or, in tests,
            ``memory://``. Each run needs a URL of its own; ``{run}`` in it stands for the name of the run directory.
        every: the first save is copied, and from then on every so many. The last save of a run is always copied, if
            the time allows it.
        keep: which copies are kept, beside the newest and the best; ``None`` keeps all.
        on_behind: ``"warn"``: a store that does not answer is tried again, and the run goes on; ``"stop"``: it saves
            and stops once copies have failed for ``timeout``, or have ended by an error that nobody expected.
        timeout: how long a start waits for the store, and an end for the last copy.

    Raises:
        UnsupportedSetting: one of them is invalid.
    """

    url: str
    every: int = 1
    keep: Policy | None = None
    on_behind: OnBehind = "warn"
    timeout: timedelta = timedelta(minutes=10)

    def __post_init__(self) -> None:
        require_url(self.url)
        require_type("keep", self.keep, Policy, "KeepLast(2)")
        if self.keep is not None and self.keep.of_weights is not None:
            raise UnsupportedSetting(f"Remote(keep={self.keep}): a mirror keeps whole copies, so leave KeepWeights out")
        if not isinstance(self.every, int) or self.every < 1:
            raise UnsupportedSetting(f"Remote(every={self.every!r}): expected a positive number of saves")
        if self.on_behind not in ("warn", "stop"):
            raise UnsupportedSetting(f'Remote(on_behind={self.on_behind!r}): expected "warn" or "stop"')
        if not isinstance(self.timeout, timedelta) or self.timeout <= timedelta():
            raise UnsupportedSetting(f"Remote(timeout={self.timeout!r}): expected a positive timedelta")


@dataclass(frozen=True)
class Memory:
    """Keeps the newest checkpoints in the memory of each node, where they survive a process that is killed.

    Two of them have to fit. They are removed when the run ends by itself, or stops after a last save.

    Args:
        every: the first committed checkpoint is copied, and from then on every so many.
        save_every: in addition, save to memory alone: every so many optimizer steps, after a ``timedelta``, or
            ``"auto"``, by what such a save costs and how often processes fail. ``None``: never.
        mtbf: mean time between failures of processes, for ``save_every="auto"``; by default what the run has seen.
        directory: a file system in memory.

    Raises:
        UnsupportedSetting: one of them is invalid.
    """

    every: int = 1
    save_every: int | timedelta | Literal["auto"] | None = None
    mtbf: timedelta | None = None
    directory: str = "/dev/shm"

    def __post_init__(self) -> None:
        if not isinstance(self.every, int) or self.every < 1:
            raise UnsupportedSetting(f"Memory(every={self.every!r}): expected a positive number of saves")
        if not isinstance(self.directory, str) or not self.directory.startswith("/"):
            raise UnsupportedSetting(f"Memory(directory={self.directory!r}): expected an absolute path")


Mirror = Remote | Memory
"""What may be in the list ``mirror``."""


def require_mirrors(given: object) -> None:
    """Refuse what is not a list of tiers.

    Raises:
        UnsupportedSetting: it is something else, or has one tier twice.
    """
    found = [each for each in given if isinstance(each, Mirror)] if isinstance(given, list | tuple) else []
    if not isinstance(given, list | tuple) or len(found) < len(given):
        raise UnsupportedSetting(f'mirror={given!r}: expected a list, such as [Remote("s3://bucket/runs/a"), Memory()]')
    tiers = [each.url.rstrip("/") if isinstance(each, Remote) else "memory" for each in found]
    if len(set(tiers)) < len(found):
        raise UnsupportedSetting(f"mirror={given!r}: expected each URL once, and Memory() once")


def mirror_of(text: str) -> Mirror:
    """Return the tier that a text names: a URL, ``memory``, or with saves to it alone ``memory:100``, ``memory:auto``.

    Raises:
        UnsupportedSetting: it is none of these.
    """
    word, _, every = text.partition(":")
    if word != "memory" or every.startswith("//"):
        return Remote(text)
    if every and every != "auto" and not every.isdecimal():
        raise UnsupportedSetting(f'{text!r}: expected "memory", or "memory:" and a number of optimizer steps or "auto"')
    return Memory(save_every=int(every) if every.isdecimal() else "auto" if every else None)


def is_url(text: str) -> bool:
    """Return whether a text names something beyond the mounted file systems."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text) is not None


def require_url(url: str) -> None:
    """Refuse what cannot be the URL of a run's copies.

    Raises:
        UnsupportedSetting: it is no URL of a store that is known, or has a password or a query: those would appear in
            messages.
    """
    if not isinstance(url, str) or not is_url(url):
        raise UnsupportedSetting(f"{url!r} is not a URL; expected one such as s3://bucket/runs/a")
    found = urlsplit(url)
    if found.scheme not in SCHEMES and not is_hub(url):
        raise UnsupportedSetting(
            f"{found.scheme}://...: unknown scheme; expected s3, gs, az, hf or file, such as file:///mnt/runs/a for a "
            "file system that is mounted"
        )
    if "@" in found.netloc or found.query or found.fragment:
        raise UnsupportedSetting(
            f"the URL {found.scheme}://... has credentials or a query; expected a bucket and a path alone, such as "
            "s3://bucket/runs/a. Credentials come from the environment, for example AWS_ACCESS_KEY_ID"
        )
    if is_hub(url):
        hub_place(url)
    elif not found.netloc and found.scheme not in ("file", "memory"):
        raise UnsupportedSetting(f"{url!r} names no bucket; expected one such as {found.scheme}://bucket/runs/a")


def is_hub(url: str) -> bool:
    """Return whether a URL is one of the Hugging Face Hub."""
    return url.startswith("hf://")


def hub_place(url: str) -> tuple[str, str, str]:
    """Return the kind and the name of the repository that a URL of the Hub names, and the folder in it.

    Raises:
        UnsupportedSetting: it names none; or a bucket, which overwrites what it is asked to create only.
    """
    if url.startswith("hf://buckets/"):
        raise UnsupportedSetting(
            f"{url}: a bucket of the Hub overwrites what exists, so two jobs with one mirror could not know of each "
            "other; expected a repository, such as hf://OWNER/NAME/runs/a"
        )
    if (found := _HUB.fullmatch(url)) is None:
        raise UnsupportedSetting(
            f"{url!r} names no repository of the Hub; expected hf://OWNER/NAME or hf://datasets/OWNER/NAME, and a path "
            "in it where several runs share it"
        )
    return "dataset" if found[1] else "model", found[2], (found[3] or "").strip("/")
