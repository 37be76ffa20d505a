"""What the system says about a write that failed, where the error of a framework does not say it."""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path

from resume_adapters.core.storage.base import Storage

_SIZE = 1 << 20
"""Bytes that are written to find out. A disk that is full for a checkpoint may still have room for a small file."""

_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)

_FULL = (errno.ENOSPC, errno.EDQUOT)


def system_error(error: BaseException) -> OSError | None:
    """Return the first error with an errno among an error and those that it was raised from."""
    following: BaseException | None = error
    while following is not None:
        if isinstance(following, OSError) and following.errno is not None:
            return following
        following = following.__cause__ or following.__context__
    return None


def is_full(error: BaseException) -> bool:
    """Return whether an error comes from a disk or a quota that is full."""
    found = system_error(error)
    return found is not None and found.errno in _FULL


def find_disk_error(storage: Storage, directory: Path, error: BaseException) -> OSError | None:
    """Return the error of the disk behind an error; ``None`` if it has another reason.

    Some writers lose the errno: of a full disk, ``torch.save`` says "unexpected pos 64 vs 0". Then a file is written
    and forced onto the disk, to see what the system says.

    Args:
        storage: the file operations.
        directory: where the write failed.
        error: what was raised.
    """
    found = system_error(error)
    if found is not None:
        return found
    probe = directory / ".probe"
    try:
        storage.write(probe, bytes(_SIZE))
        storage.sync(probe)
    except OSError as refused:
        found = refused if refused.errno in _OF_THE_DISK else None
    with contextlib.suppress(OSError):  # it lies in a checkpoint that is abandoned
        storage.remove_file(probe)
    return found
