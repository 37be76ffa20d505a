"""Maintenance of a run directory, by its leader rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from resume_adapters.core.checkpoint import layout
from resume_adapters.core.checkpoint.catalog import Catalog, candidates
from resume_adapters.core.checkpoint.layout import (
    CONTROL,
    EXTRAS,
    LATEST,
    PENDING,
    SUPERSEDED,
    CheckpointState,
    must_be_restored,
    pending_text,
    state_of,
)
from resume_adapters.core.checkpoint.remove import (
    BEGUN,
    REMOVED,
    Fence,
    delete,
    delete_leftover,
    restore_superseded,
    set_aside,
)
from resume_adapters.core.checkpoint.validity import CommitHistory, ForeignDetector, foreign_step
from resume_adapters.core.log import logger
from resume_adapters.core.run_directory.control import ControlDirectory, Leftovers
from resume_adapters.core.run_directory.journal import Journal
from resume_adapters.core.storage.base import (
    Storage,
    is_temporary,
    make_durable_directory,
    temporary_path,
)
from resume_adapters.errors import CheckpointDamaged, FormatTooNew, RunDirectoryUnusable


def prepare(storage: Storage, directory: Path) -> None:
    """Create the run directory if it is missing, and check that it can be written.

    Raises:
        RunDirectoryUnusable: it is a file, or cannot be written.
    """
    probe = temporary_path(directory / CONTROL / "probe")
    with usable(directory):
        _require_own(storage, directory / CONTROL)
        make_durable_directory(storage, directory / CONTROL)
        storage.write(probe, b"can this be written?\n")
        with contextlib.suppress(FileNotFoundError):  # a start at the same moment has removed it, as a leftover
            storage.remove_file(probe)


def _require_own(storage: Storage, control: Path) -> None:
    """Refuse files of the run directory that are links: what is written there would go somewhere else.

    Raises:
        RunDirectoryUnusable: naming the link.
    """
    for path in (control, control / "journal.jsonl", control / "set-aside"):
        if storage.is_link(path):
            raise RunDirectoryUnusable(
                f"{path} is a symbolic link to {storage.read_link(path)}; a run does not write "
                "through links: remove it",
                path=path,
            )


@contextlib.contextmanager
def usable(directory: Path) -> Iterator[None]:
    """Translate OSError into RunDirectoryUnusable.

    Raises:
        RunDirectoryUnusable: it is a file, or cannot be written.
    """
    try:
        yield
    except (FileExistsError, NotADirectoryError) as error:
        raise RunDirectoryUnusable(
            f"{directory} is a file, or lies below one; expected a directory for the run's checkpoints", path=directory
        ) from error
    except OSError as error:
        raise RunDirectoryUnusable(
            f"{directory} cannot be written ({error.strerror or error}); a run that cannot save cannot be resumed: "
            "fix its permissions or free space",
            path=directory,
        ) from error


def free_latest(storage: Storage, directory: Path, fence: Fence) -> str | None:
    """Free the name of the link to the newest checkpoint, where a directory has it.

    Tools that copy links as files make one. A copy of a checkpoint that is there is set aside.

    Returns:
        What was found and done; ``None`` if the name was free.

    Raises:
        RunDirectoryUnusable: a directory has that name that is no copy of a checkpoint here.
    """
    latest = directory / LATEST
    if not storage.is_directory(latest) or storage.is_link(latest):
        return None
    if (original := _original(storage, latest)) is None:
        raise RunDirectoryUnusable(
            f"{latest} is a directory; expected that name to be free for the link to the newest checkpoint: rename it",
            path=latest,
        )
    found = f"{latest} is a directory: some tools copy a link as one. It is a copy of {original.name}"
    return f"{found}, and is moved to {set_aside(storage, latest, fence)}"


def _original(storage: Storage, copy: Path) -> Path | None:
    """Return the checkpoint of the same run directory that has the same manifest as a copy."""
    if not layout.is_committed(storage, copy):
        return None
    content = storage.read(layout.manifest_path(storage, copy))
    for path in candidates(storage, copy.parent):
        is_committed = layout.is_committed(storage, path) and not storage.is_link(path)
        if is_committed and storage.read(layout.manifest_path(storage, path)) == content:
            return path
    return None


def sweep(
    catalog: Catalog,
    control: ControlDirectory,
    fence: Fence,
    is_placeholder: Callable[[Path], bool] = lambda path: False,
) -> dict[Path, Path]:
    """Remove the leftovers of crashed saves and prunes, and restore what a crashed second save superseded.

    Args:
        catalog: the checkpoints of the run directory.
        control: counts what cannot be removed; its journal gets the entry of a commit that a crash left out.
        fence: raises where a later start owns the run directory.
        is_placeholder: returns whether a pending checkpoint stays until one is committed.

    Returns:
        The new path of each checkpoint that was restored.

    Raises:
        FencedOff: a later start owns the run directory.
    """
    storage, directory, leftovers = catalog.storage, catalog.directory, control.leftovers
    # First: a checkpoint of an earlier start that wakes up may still get its name, and is then found under that.
    for entry in sorted(storage.entries(control.path)):
        if entry.name.startswith((BEGUN, REMOVED)):
            leftovers.add(control.path / entry.name, delete_leftover(storage, control.path / entry.name, fence))
    committed = set(catalog.committed())
    for path in candidates(storage, directory):
        if storage.is_link(path):
            continue
        if path.name in committed:
            if not catalog.is_published(path):
                _complete(path, catalog, control.journal, fence)
        elif state_of(storage, path) is CheckpointState.PENDING and (committed or not is_placeholder(path)):
            leftovers.add(path, delete(storage, path, fence))
    _remove_temporary_files(storage, directory, fence)
    restored: dict[Path, Path] = {}
    if not any(SUPERSEDED in entry.name for entry in storage.entries(directory)):
        return restored
    for path in candidates(storage, directory):
        original = layout.original_path(path)
        if must_be_restored(storage, original):
            restore_superseded(storage, original, fence)
            restored[path] = original
    return restored


def _complete(path: Path, catalog: Catalog, journal: Journal, fence: Fence) -> None:
    """Do what a process that was killed right after a commit, or woken up there, has left undone."""
    fence()
    storage, name = catalog.storage, layout.original_path(path).name
    if layout.is_unfinished(storage, path) and not journal.committed().has(name):
        with contextlib.suppress(CheckpointDamaged, FormatTooNew):  # it is not resumed from either
            journal.append("commit", step=catalog.summary(path).step, checkpoint=name)
    with contextlib.suppress(FileNotFoundError):  # it woke up, and has done so itself
        storage.remove_file(layout.pending_path(storage, path))


def _remove_temporary_files(storage: Storage, directory: Path, fence: Fence) -> None:
    """Remove what crashed writes of small files left. An earlier start that wakes up can no longer rename its own."""
    control = directory / CONTROL
    found = [control / entry.name for entry in storage.entries(control) if entry.kind == "file"]
    found += [directory / entry.name for entry in storage.entries(directory) if entry.name.startswith(f".{LATEST}.")]
    for file in sorted(found):
        if is_temporary(file.name):
            fence()
            with contextlib.suppress(FileNotFoundError):
                storage.remove_file(file)


def is_checkpoint(storage: Storage, path: Path, foreign: ForeignDetector) -> bool:
    """Return whether a path is a checkpoint of any state, valid or not."""
    if state_of(storage, path) in (CheckpointState.COMMITTED, CheckpointState.PENDING):
        return True
    try:
        return foreign_step(storage, path, foreign, CommitHistory()) is not None
    except CheckpointDamaged:
        return True


_CHECKPOINTS = 2
"""How many checkpoints of the known size there should be room for."""


def format_bytes(count: int) -> str:
    """Format a number of bytes with three digits and a decimal unit, for example ``1.42 GB``."""
    value, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        del units[0]
    return f"{count} B" if units[0] == "B" else f"{value:.3g} {units[0]}"


def warn_if_short(storage: Storage, directory: Path, size: int) -> None:
    """Warn where there is no room for two more checkpoints.

    Args:
        storage: the file operations.
        directory: the run directory.
        size: bytes of a checkpoint, as the last one had.
    """
    free = storage.free_bytes(directory)
    if free < _CHECKPOINTS * size:
        logger.warning(
            "%s has %s free, and a checkpoint takes %s: expected room for two (%s), since a new one is written before "
            "an older one is removed. Free space, or a save may fail.",
            directory,
            format_bytes(free),
            format_bytes(size),
            format_bytes(_CHECKPOINTS * size),
        )


class Placeholder:
    """The placeholder of a run directory.

    Args:
        storage: the file operations.
        directory: the run directory.
        name: its name; ``None`` where the framework needs none.
    """

    def __init__(self, storage: Storage, directory: Path, name: str | None) -> None:
        self._storage = storage
        self._path = None if name is None else directory / name

    def place(self, foreign: ForeignDetector, *, is_scratch: bool) -> None:
        """Make it where the run directory has no checkpoint, before anything else of this package is there.

        Args:
            foreign: recognises the checkpoints of the bare framework.
            is_scratch: the checkpoints that are there will be set aside.

        Raises:
            RunDirectoryUnusable: the run directory is a file, or cannot be written.
        """
        path = self._path
        if path is None or not self._is_free(path) or (self._has_checkpoint(path, foreign) and not is_scratch):
            return
        with usable(path.parent):
            # Without its marker it would look foreign: a kill in between leaves it to the next start.
            make_durable_directory(self._storage, path / EXTRAS)
            self._storage.write(path / EXTRAS / PENDING, pending_text(path.name))
            self._storage.sync(path / EXTRAS / PENDING)

    def _is_free(self, path: Path) -> bool:
        """Return whether nothing has the name but a placeholder, which a kill may have cut off before its marker."""
        storage, extras = self._storage, path / EXTRAS
        if state_of(storage, path) in (CheckpointState.PENDING, CheckpointState.REMOVED):
            return True
        names = [entry.name for entry in storage.entries(path)] if storage.is_directory(path) else [""]
        return names == [] or (names == [EXTRAS] and not storage.entries(extras))

    def _has_checkpoint(self, path: Path, foreign: ForeignDetector) -> bool:
        return any(
            state_of(self._storage, each) is not CheckpointState.PENDING and is_checkpoint(self._storage, each, foreign)
            for each in candidates(self._storage, path.parent)
            if each != path
        )

    def is_at(self, path: Path) -> bool:
        """Return whether a path is the placeholder's."""
        return path == self._path

    def remove(self, leftovers: Leftovers, fence: Fence) -> None:
        """Remove it, once a checkpoint is committed.

        Args:
            leftovers: counts what cannot be removed.
            fence: raises where a later start owns the run directory.

        Raises:
            FencedOff: a later start owns the run directory.
        """
        if self._path is not None and state_of(self._storage, self._path) is CheckpointState.PENDING:
            leftovers.add(self._path, delete(self._storage, self._path, fence))
