"""The checkpoints of a run directory. Reads only.

A run may keep very many. So a :class:`Catalog` remembers what it has read of each, as long as its manifest is the same
file: a commit then costs no read of the checkpoints before it.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from resume_adapters.core.checkpoint import layout
from resume_adapters.core.checkpoint.checkpoint import CheckpointInfo
from resume_adapters.core.checkpoint.layout import LATEST, SUPERSEDED, CheckpointState, state_of
from resume_adapters.core.checkpoint.manifest import Manifest
from resume_adapters.core.checkpoint.validity import (
    CommitHistory,
    ForeignDetector,
    check_sizes,
    foreign_step,
    read_manifest,
)
from resume_adapters.core.storage.base import Entry, Stamp, Storage
from resume_adapters.errors import CheckpointDamaged, FormatTooNew, RunDirectoryUnusable

FILE_SUFFIX = ".ckpt"
"""Suffix of checkpoints that are single files, if this package has nothing beside them."""

_LAST_NUMBER = re.compile(r"(\d+)(?!.*\d)")


def candidates(storage: Storage, run_directory: Path) -> list[Path]:
    """Return the paths that may be checkpoints, newest first by the number in the name.

    These are all directories and links, the files with this package's directory beside them or with Lightning's suffix,
    and checkpoints of which only this package's directory is left.

    Raises:
        RunDirectoryUnusable: the run directory is not a directory, or cannot be listed.
    """
    try:
        entries = storage.entries(run_directory)
    except FileNotFoundError:
        return []
    except NotADirectoryError as error:
        raise RunDirectoryUnusable(
            f"{run_directory} is a file; expected the directory of the run's checkpoints", path=run_directory
        ) from error
    except OSError as error:
        raise RunDirectoryUnusable(f"{run_directory} cannot be listed: {error.strerror}", path=run_directory) from error
    names = {_checkpoint_name(storage, run_directory, entry) for entry in entries if entry.name != LATEST}
    found = [name for name in names if name is not None]
    return [run_directory / name for name in sorted(found, key=lambda name: newest_first(name, number_in(name)))]


def _checkpoint_name(storage: Storage, run_directory: Path, entry: Entry) -> str | None:
    """Return the name of the checkpoint that an entry of a run directory may be, or belong to."""
    if entry.name.startswith(".") or not _is_unicode(entry.name):
        return None
    named_so = entry.kind == "directory" and entry.name.endswith(layout.SIDECAR_SUFFIX)
    if named_so and layout.is_sidecar(storage, run_directory / entry.name):
        return entry.name.removesuffix(layout.SIDECAR_SUFFIX)
    if entry.kind in ("link", "directory") or entry.name.endswith(FILE_SUFFIX):
        return entry.name
    return None


def _is_unicode(name: str) -> bool:
    """Return whether a name is one that a framework or this package could have given."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


FOREIGN, UNRANKED = -2, -3
"""In the place of the step: of what was not committed, and of what says no step besides."""


def newest_first(name: str, step: int, written: float = 0.0) -> tuple[int, bool, float, str]:
    """Return the key that sorts checkpoints in the order in which a resume tries them."""
    return -step, name.endswith(SUPERSEDED), -written, name


def number_in(name: str) -> int:
    """Return the last number in a name; -1 where there is none."""
    found = _LAST_NUMBER.search(name)
    return int(found[0]) if found else -1


def sort_key(
    storage: Storage,
    path: Path,
    foreign: ForeignDetector,
    history: CommitHistory,
    read: Callable[[Path], Manifest | Summary],
) -> tuple[int, float]:
    """Return the step of a checkpoint and the time when it was written.

    Of two checkpoints of one step, the one written later is newer. A foreign one is older than every other: it has no
    step here, and in the place of the time the step that its content says, or with :data:`UNRANKED` the number in its
    name. What cannot be resumed from is tried, and named, where its name would have it.

    Args:
        storage: where to read.
        path: the checkpoint.
        foreign: recognises the checkpoints of the bare framework.
        history: what the run has committed.
        read: reads the manifest of a committed checkpoint.
    """
    try:
        manifest = read(path)
        return manifest.step, manifest.written
    except (CheckpointDamaged, FormatTooNew):
        if state_of(storage, path) in (CheckpointState.COMMITTED, CheckpointState.PENDING):
            return number_in(path.name), 0.0
    with contextlib.suppress(CheckpointDamaged):
        found = foreign_step(storage, path, foreign, history)
        if found is not None:
            return FOREIGN if found.is_content else UNRANKED, float(found.step)
    return number_in(path.name), 0.0


def list_checkpoints(
    storage: Storage, run_directory: Path, foreign: ForeignDetector, history: CommitHistory
) -> list[CheckpointInfo]:
    """Describe every checkpoint of a run directory, oldest first, without reading the files' content.

    Args:
        storage: where to read.
        run_directory: where the checkpoints are.
        foreign: recognises the checkpoints of the bare framework.
        history: what the run has committed.
    """
    rows = []
    read = functools.partial(read_manifest, storage)
    found = {
        path: newest_first(path.name, *sort_key(storage, path, foreign, history, read))
        for path in candidates(storage, run_directory)
    }
    for path in sorted(found, key=lambda path: found[path], reverse=True):
        try:
            state = state_of(storage, path)
            if state is CheckpointState.PENDING:
                rows.append(CheckpointInfo(path, state, None, None, "was begun and never committed"))
            elif state is CheckpointState.COMMITTED:
                manifest = read_manifest(storage, path)
                check_sizes(storage, path, manifest)
                found_state = CheckpointState.WEIGHTS_ONLY if manifest.weights_only else state
                rows.append(CheckpointInfo(path, found_state, manifest.step, manifest))
            elif (bare := foreign_step(storage, path, foreign, history)) is not None:
                rows.append(
                    CheckpointInfo(
                        path, state, bare.step, None, "was made without resume-adapters", is_ranked=bare.is_content
                    )
                )
        except FormatTooNew as error:
            rows.append(CheckpointInfo(path, CheckpointState.NEWER, None, None, str(error)))
        except CheckpointDamaged as error:
            rows.append(CheckpointInfo(path, CheckpointState.DAMAGED, None, None, str(error)))
    return rows


class Summary(NamedTuple):
    """What is remembered of a manifest: all that choosing and retention ask of it, without the list of its files."""

    step: int
    written: float
    metrics: dict[str, float | None]
    best: str | None
    weights_only: bool


class Catalog:
    """The committed checkpoints of a run directory, each of which is read once.

    Args:
        storage: the file operations.
        directory: the run directory.
    """

    def __init__(self, storage: Storage, directory: Path) -> None:
        self.directory = directory
        self.storage = storage
        self._markers: dict[str, Path] = {}
        self._read: dict[Path, tuple[Stamp, Summary]] = {}
        self._whole: dict[str, tuple[Stamp, Summary | None]] = {}
        self._linked: dict[str, str] = {}

    def committed(self) -> dict[str, Stamp]:
        """Return the committed checkpoints, newest first by the number in the name, and the stamps of their markers."""
        paths = candidates(self.storage, self.directory)
        kinds = {entry.name: entry.kind for entry in self.storage.entries(self.directory)} if paths else {}
        former, self._markers = self._markers, {}
        self._linked = self._targets(path.name for path in paths if kinds.get(path.name) == "link")
        found = {}
        for path in paths:
            name = path.name
            # Most are directories with the marker inside: the listing says so, and the disk is looked at once.
            is_plain = kinds.get(name) == "directory" and f"{name}{layout.SIDECAR_SUFFIX}" not in kinds
            if is_plain:
                marker = self._markers[name] = former.get(name) or layout.inner_dir(path) / layout.MANIFEST
            else:
                marker = layout.manifest_path(self.storage, path)
            stamp = self.storage.stamp(marker)
            if stamp is not None:
                found[name] = stamp
        return found

    def _targets(self, links: Iterable[str]) -> dict[str, str]:
        targets = {name: self.storage.real_path(self.directory / name) for name in links}
        here = self.storage.real_path(self.directory) if targets else self.directory
        return {target.name: name for name, target in sorted(targets.items()) if target.parent == here}

    @property
    def linked(self) -> dict[str, str]:
        """The names to which links of the run directory point, as last listed, each with the name of a link to it."""
        return dict(self._linked)

    def _marker(self, path: Path) -> Path:
        """Return the marker of a checkpoint; that of a plain directory is known from the last listing."""
        known = self._markers.get(path.name) if path.parent == self.directory else None
        return known or layout.manifest_path(self.storage, path)

    def is_published(self, path: Path) -> bool:
        """Return whether the marker of a pending checkpoint is gone from a committed one."""
        return not self.storage.exists(self._marker(path).with_name(layout.PENDING))

    def summary(self, path: Path) -> Summary:
        """Return what is remembered of a checkpoint's manifest, which is read if its file is new or has changed.

        Raises:
            CheckpointDamaged: as :func:`~resume_adapters.core.checkpoint.validity.read_manifest` does.
            FormatTooNew: a later version wrote it.
        """
        marker = self._marker(path)
        stamp = self.storage.stamp(marker)
        found = self._read.get(marker)
        if found is not None and found[0] == stamp:
            return found[1]
        manifest = read_manifest(self.storage, path)
        summary = Summary(manifest.step, manifest.written, manifest.metrics, manifest.best, manifest.weights_only)
        if stamp is not None:
            self._read[marker] = stamp, summary
        return summary

    def whole(self) -> dict[str, Summary | None]:
        """Return the committed checkpoints, without links to them; ``None`` for one whose files lack their sizes.

        The sizes of a checkpoint are looked at once: see :meth:`look_again`.
        """
        former, self._whole = self._whole, {}
        for name, stamp in self.committed().items():
            if name in former and former[name][0] == stamp:
                self._whole[name] = former[name]
            elif not self.storage.is_link(self.directory / name):
                self._whole[name] = stamp, self._look(name)
        return {name: summary for name, (_, summary) in self._whole.items()}

    def look_again(self, names: Iterable[str] | None = None) -> bool:
        """Look at the sizes of some checkpoints again, by default of all; return whether one is damaged since."""
        is_damaged = False
        for name in list(self._whole) if names is None else names:
            known = self._whole.get(name)
            if known is not None and known[1] is not None and self._look(name) is None:
                self._whole[name] = known[0], None
                is_damaged = True
        return is_damaged

    def _look(self, name: str) -> Summary | None:
        path = self.directory / name
        try:
            check_sizes(self.storage, path, read_manifest(self.storage, path))
            return self.summary(path)
        except (CheckpointDamaged, FormatTooNew):
            return None
