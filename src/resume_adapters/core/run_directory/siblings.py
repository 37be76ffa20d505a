"""Find the run that a launch may have meant to continue, where its directory is named after the time or the job."""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from resume_adapters.core.run_directory.control import ControlDirectory
from resume_adapters.core.run_directory.status import RunState, RunStatus, is_alive, observed_state
from resume_adapters.core.storage.base import Storage

_NEW_AT_EACH_LAUNCH = (
    (re.compile(r"\d\d[-_:]\d\d[-_:]\d\d"), 6),  # a date or a time
    (re.compile(r"(?<![.\d])\d{4}"), 4),  # a year, or the number of a job; not the value of a setting: lr=0.0001
    (re.compile(r"(?<![.=\d])\d+$"), 2),  # what is counted: exp2, or version_3/checkpoints
    (re.compile(r"^v(ersion_)?\d+$"), 3),  # v3/weights/lightning
)
"""What tells that a directory of a path is new at each launch, and how far from the end of the path."""

_LOOKED_AT = 100
"""How many paths are looked at, the latest first by their names."""

_UNFINISHED = (RunState.STOPPED, RunState.KILLED, RunState.FAILED)

_SILENT = 60.0
"""Seconds without a new status, which a run writes each second, after which one on another host counts as left."""


class Sibling(NamedTuple):
    """A run that is not finished, how it was left, and at which step."""

    path: Path
    left: str
    step: int
    updated: float


def unfinished_sibling(storage: Storage, directory: Path) -> Sibling | None:
    """Return the latest unfinished run with a checkpoint whose path differs from a directory in its digits alone.

    Args:
        storage: the file operations.
        directory: the run directory of this launch, absolute.
    """
    directory = storage.real_path(directory)  # a link to the newest leads to one that is new at each launch
    parts = directory.parts
    first = next((at for at, part in enumerate(parts) if _is_new_at_each_launch(part, len(parts) - at)), None)
    if first is None:
        return None
    alike = itertools.islice(_alike(storage, Path(*parts[:first]), parts[first:]), _LOOKED_AT)
    found = [each for path in alike if path != directory and (each := _unfinished(storage, path)) is not None]
    return max(found, key=lambda each: each.updated, default=None)


def _is_new_at_each_launch(name: str, from_end: int) -> bool:
    return any(form.search(name) and from_end <= levels for form, levels in _NEW_AT_EACH_LAUNCH)


def _unfinished(storage: Storage, path: Path) -> Sibling | None:
    control = ControlDirectory(storage, path, time.time)
    try:
        status = control.status.read()
        left = _left(status)
        if status is None or not left:
            return None
        # Not from the status, which knows nothing of the first second.
        steps = [entry.get("step") or 0 for entry in control.journal.history() if entry["event"] == "commit"]
    except OSError:  # another user's, or a file on the way: a hint is worth no error
        return None
    return Sibling(path, left, max(status.step, steps[-1]), status.updated) if steps else None


def _left(status: RunStatus | None) -> str:
    """Return how an unfinished run was left; nothing where it may be running."""
    state = observed_state(status)
    if status is None or state is not RunState.RUNNING or is_alive(status):
        return state.value if state in _UNFINISHED else ""
    silent = time.time() - status.updated  # its process is on another host
    return f"silent for {silent:.0f} s" if silent > _SILENT else ""


def _alike(storage: Storage, parent: Path, rest: tuple[str, ...]) -> Iterator[Path]:
    """Yield the paths below a directory whose names differ from the given ones in their digits alone."""
    if not rest:
        yield parent
        return
    shape, names = _shape(rest[0]), [rest[0]]
    if shape != rest[0]:
        with contextlib.suppress(OSError):  # likewise
            names = sorted((each.name for each in storage.entries(parent) if _shape(each.name) == shape), reverse=True)
    for name in names:
        yield from _alike(storage, parent / name, rest[1:])


def _shape(name: str) -> str:
    return re.sub(r"\d+", "0", name)
