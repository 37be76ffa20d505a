"""Find the run that a launch may have meant to continue, where its directory is named after the time or the job."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from resume_adapters.core.run_directory.control import ControlDirectory
from resume_adapters.core.run_directory.status import RunState, RunStatus, observed_state
from resume_adapters.core.storage.base import Storage

_NEW_AT_EACH_LAUNCH = re.compile(r"(?<![.\d])\d{4}|\d\d[-_:]\d\d[-_:]\d\d")
"""A date, a time or the number of a job; not the value of a setting, such as lr=0.0001."""

_COUNTED = re.compile(r"(?<![.=\d])\d+$")
"""The number of one of the last two directories: exp2, or version_3/checkpoints."""

_LEVELS = 4
"""How many directories of a path may be named so, from its end."""

_LOOKED_AT = 100
"""How many names of a directory are looked at, the latest first."""

_UNFINISHED = (RunState.STOPPED, RunState.KILLED, RunState.FAILED)


class Sibling(NamedTuple):
    """A run that is not finished, and how it was left."""

    path: Path
    state: RunState
    status: RunStatus


def unfinished_sibling(storage: Storage, directory: Path) -> Sibling | None:
    """Return the latest unfinished run with a checkpoint whose path differs from a directory in its digits alone.

    Args:
        storage: the file operations.
        directory: the run directory of this launch, absolute.
    """
    parts = directory.parts
    dated = [
        number
        for number, part in enumerate(parts)
        if _NEW_AT_EACH_LAUNCH.search(part) or (number >= len(parts) - 2 and _COUNTED.search(part))
    ]
    first = next((number for number in dated if len(parts) - number <= _LEVELS), None)
    if first is None:
        return None
    alike = [path for path in _alike(storage, Path(*parts[:first]), parts[first:]) if path != directory]
    found = [each for path in alike if (each := _unfinished(storage, path)) is not None]
    return max(found, key=lambda each: each.status.updated, default=None)


def _unfinished(storage: Storage, path: Path) -> Sibling | None:
    try:
        status = ControlDirectory(storage, path, time.time).status.read()
    except OSError:  # another user's, or a file on the way: a hint is worth no error
        return None
    state = observed_state(status)
    is_left = status is not None and state in _UNFINISHED and status.last_commit is not None
    return Sibling(path, state, status) if status is not None and is_left else None


def _alike(storage: Storage, parent: Path, rest: tuple[str, ...]) -> Iterator[Path]:
    """Yield the paths below a directory whose names differ from the given ones in their digits alone."""
    if not rest:
        yield parent
        return
    shape, names = _shape(rest[0]), [rest[0]]
    if shape != rest[0]:
        with contextlib.suppress(OSError):  # likewise
            names = sorted((each.name for each in storage.entries(parent) if _shape(each.name) == shape), reverse=True)
    for name in names[:_LOOKED_AT]:
        yield from _alike(storage, parent / name, rest[1:])


def _shape(name: str) -> str:
    return re.sub(r"\d+", "0", name)
