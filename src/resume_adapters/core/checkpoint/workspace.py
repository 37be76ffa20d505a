"""The directories in which checkpoints are written before they have their names, made ahead of the saves.

Each is on the disk with the marker of a pending checkpoint before anything else is written there, for which the disk is
waited for three times. The training would wait for that at each save, so the thread that commits one checkpoint makes
the directory of the next.
"""

from __future__ import annotations

import contextlib
import uuid
from pathlib import Path
from typing import NamedTuple

from resume_adapters.core.checkpoint import layout
from resume_adapters.core.checkpoint.layout import CONTROL, PENDING
from resume_adapters.core.checkpoint.remove import BEGUN, delete_begun
from resume_adapters.core.storage.base import Storage

_NEXT = "next"
"""Name of a checkpoint whose own name is not known yet."""


class _Ready(NamedTuple):
    """An empty pending checkpoint.

    Attributes:
        place: where it is, until it is taken.
        is_file: the framework will write one file, not a directory.
    """

    place: Path
    is_file: bool


class Workspaces:
    """Makes empty pending checkpoints in ``.resume``, as the start that owns the run directory.

    A later start removes those of earlier ones, and uses none of their names.

    Args:
        storage: the file operations.
        run_directory: the run directory.
    """

    def __init__(self, storage: Storage, run_directory: Path) -> None:
        self._storage = storage
        self._control = run_directory / CONTROL
        self._ready: _Ready | None = None

    def take(self, name: str, *, is_file: bool) -> Path:
        """Return where a checkpoint is to be written; its marker as a pending one is on the disk.

        Args:
            name: its name.
            is_file: the framework writes one file of that name, not a directory.
        """
        ready, self._ready = self._ready, None
        if ready is not None and ready.is_file == is_file:
            with contextlib.suppress(FileNotFoundError):  # somebody has removed it meanwhile
                return self._named(ready.place, name, is_file=is_file)
        if ready is not None:
            delete_begun(self._storage, ready.place.parent)
        return self._make(name, is_file=is_file)

    def make_ahead(self, *, is_file: bool) -> None:
        """Make what the next :meth:`take` returns, as far as the disk allows: otherwise that will say what is wrong."""
        with contextlib.suppress(OSError):
            self._ready = _Ready(self._make(_NEXT, is_file=is_file), is_file)

    def close(self) -> None:
        """Remove what was made ahead; what cannot be removed is left to the next start."""
        ready, self._ready = self._ready, None
        if ready is not None:
            with contextlib.suppress(OSError):
                delete_begun(self._storage, ready.place.parent)

    def _make(self, name: str, *, is_file: bool) -> Path:
        place = self._control / f"{BEGUN}{uuid.uuid4().hex}" / name
        own = layout.own_dir(place, is_file=is_file)
        self._storage.make_directory(own)
        self._storage.write(own / PENDING, layout.pending_text(name))
        self._storage.sync(own / PENDING)
        self._storage.sync(own)
        if not is_file:
            self._storage.sync(place)
        return place

    def _named(self, place: Path, name: str, *, is_file: bool) -> Path:
        named = place.with_name(name)
        if is_file:
            self._storage.replace(layout.own_dir(place, is_file=True), layout.own_dir(named, is_file=True))
        else:
            self._storage.replace(place, named)
        return named
