"""A directory of this user alone, in a place where all users may write, such as ``/dev/shm``."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path


def make_private_directory(path: Path) -> None:
    """Create a directory that no other user can enter; one that exists is used if it is this user's own.

    Args:
        path: the directory; its parent exists.

    Raises:
        PermissionError: what has the name is another user's, a link, no directory, or open to others.
        OSError: it cannot be created.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    found = os.lstat(path)
    what = (
        "a link"
        if stat.S_ISLNK(found.st_mode)
        else "not a directory"
        if not stat.S_ISDIR(found.st_mode)
        else f"of the user {found.st_uid}, and this process runs as {os.geteuid()}"
        if found.st_uid != os.geteuid()
        else f"open to other users (mode {stat.S_IMODE(found.st_mode):o}, expected 700)"
        if found.st_mode & 0o077
        else ""
    )
    if what:
        raise PermissionError(errno.EACCES, f"it is {what}: remove it, or name another directory", str(path))
