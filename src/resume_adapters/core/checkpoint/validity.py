"""Check that a checkpoint agrees with its manifest. Reads only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from resume_adapters.core.checkpoint import layout
from resume_adapters.core.checkpoint.layout import CheckpointState, is_committed, state_of
from resume_adapters.core.checkpoint.manifest import FileEntry, Manifest, decode_manifest
from resume_adapters.core.storage.base import Storage
from resume_adapters.errors import CheckpointDamaged


def subjects(entry: Mapping[str, Any]) -> list[str | int]:
    """Return the checkpoints that an entry of the journal commits or removes: names, or a step where it has no name.

    An entry ``rewind`` removes all of later steps; it names none.
    """
    event, name, step = entry["event"], entry.get("checkpoint"), entry.get("step")
    moved = entry.get("set_aside")
    if event in ("commit", "prune") and isinstance(name, str):
        return [name]
    if event == "commit" and isinstance(step, int):
        return [step]
    return [str(each) for each in moved] if event == "start" and isinstance(moved, list) else []


class CommitHistory:
    """Which checkpoints a run has committed and not removed since, according to its journal.

    What a run directory holds is not enough to know: a checkpoint that lost this package's files looks like one of the
    bare framework, and a copy of a checkpoint looks like one that the run has committed.

    Args:
        entries: those of its journal, oldest first.
    """

    def __init__(self, entries: Iterable[Mapping[str, Any]] = ()) -> None:
        self._steps: dict[str, int] = {}
        self._unnamed: set[int] = set()
        for entry in entries:
            self.add(entry)

    def add(self, entry: Mapping[str, Any]) -> None:
        """Count one more entry of the journal."""
        event, name, step = entry["event"], entry.get("checkpoint"), entry.get("step")
        if event == "commit" and isinstance(step, int):
            if isinstance(name, str):
                self._steps[name] = step
            else:  # version 0.1.0 did not write the name
                self._unnamed.add(step)
        elif event in ("prune", "start"):
            for each in subjects(entry):
                self._steps.pop(str(each), None)
        elif event == "rewind" and isinstance(step, int):
            self._steps = {name: known for name, known in self._steps.items() if known <= step}

    def has(self, name: str) -> bool:
        """Return whether the run committed a checkpoint under this name, and has not removed it."""
        return name in self._steps

    def has_unnamed(self, step: int) -> bool:
        """Return whether the run committed a checkpoint of this step whose name the journal does not say."""
        return step in self._unnamed


class ForeignStep(NamedTuple):
    """The step of a checkpoint that the bare framework wrote.

    Attributes:
        step: optimizer steps completed.
        is_content: the content says so. If it says none, the number in the name is all there is: enough to continue
            from, not to outrank what the run has committed.
    """

    step: int
    is_content: bool = True


class ForeignDetector(Protocol):
    """Recognises checkpoints that the bare framework wrote. An adapter provides it."""

    def step(self, path: Path) -> ForeignStep | None:
        """Return the step of a checkpoint; ``None`` for what is not a checkpoint.

        It is asked of every candidate, so it reads no weights.

        Raises:
            CheckpointDamaged: the checkpoint lacks files.
        """

    def require_whole(self, path: Path) -> None:
        """Read the files of a checkpoint that has a step.

        Raises:
            CheckpointDamaged: one of them is torn.
        """


class NoForeign:
    """Recognises only checkpoints that this package wrote."""

    def step(self, path: Path) -> ForeignStep | None:
        """Recognise nothing."""
        return None

    def require_whole(self, path: Path) -> None:
        """No-op."""


def read_manifest(storage: Storage, path: Path) -> Manifest:
    """Read the manifest of a committed checkpoint.

    Raises:
        CheckpointDamaged: the manifest cannot be read, or the checkpoint is a link that leaves the run directory.
        FormatTooNew: a later version wrote it.
    """
    require_in_run_directory(storage, path)
    try:
        return decode_manifest(storage.read(layout.manifest_path(storage, path)))
    except OSError as error:
        raise CheckpointDamaged(f"manifest.json cannot be read: {error.strerror}", path=path) from error


def require_in_run_directory(storage: Storage, path: Path) -> None:
    """Refuse a checkpoint that is a symbolic link out of the run directory.

    Raises:
        CheckpointDamaged: it is one.
    """
    if storage.is_link(path) and not _points_into_run_directory(storage, path):
        found = storage.read_link(path)
        raise CheckpointDamaged(f"is a symbolic link that leaves the run directory ({found})", path=path)


def is_alias(storage: Storage, path: Path) -> bool:
    """Return whether a candidate is a symbolic link to a committed checkpoint of the same run directory."""
    return storage.is_link(path) and is_committed(storage, path) and _points_into_run_directory(storage, path)


def _points_into_run_directory(storage: Storage, link: Path) -> bool:
    return storage.real_path(link).parent == storage.real_path(link.parent)


def check_sizes(storage: Storage, path: Path, manifest: Manifest) -> None:
    """Check that every file of a manifest exists and has its size.

    Raises:
        CheckpointDamaged: naming the first file that is not.
    """
    locate = layout.locator(storage, path)
    for entry in manifest.files:
        try:
            size = storage.size(locate(entry.path))
        except OSError as error:
            raise CheckpointDamaged(f"{entry.path} cannot be read: {error.strerror}", path=path) from error
        if size != entry.bytes:
            raise CheckpointDamaged(f"{entry.path} has {size} bytes, its manifest says {entry.bytes}", path=path)


def check_digests(storage: Storage, path: Path, entries: Iterable[FileEntry], each: Callable[..., Any] = map) -> None:
    """Read files and compare their digests.

    Args:
        entries: the files.
        each: calls a function with each of them, as ``map`` does, or the ``map`` of an executor.

    Raises:
        CheckpointDamaged: naming the first file that does not agree.
    """
    locate = layout.locator(storage, path)

    def check(entry: FileEntry) -> None:
        try:
            _, digest = storage.digest(locate(entry.path), skip_holes=True)
        except OSError as error:
            raise CheckpointDamaged(f"{entry.path} cannot be read: {error.strerror}", path=path) from error
        if digest != entry.digest:
            raise CheckpointDamaged(
                f"{entry.path} has the digest {digest}, its manifest says {entry.digest}: its content has changed",
                path=path,
            )

    for _ in each(check, entries):
        pass


def foreign_step(storage: Storage, path: Path, foreign: ForeignDetector, history: CommitHistory) -> ForeignStep | None:
    """Return the step of a checkpoint without a manifest; ``None`` for what is not a checkpoint.

    Args:
        storage: where to read.
        path: the checkpoint.
        foreign: recognises the checkpoints of the bare framework.
        history: what the run has committed: that is never foreign.

    Raises:
        CheckpointDamaged: it is incomplete, or has lost its manifest.
    """
    if state_of(storage, path) is CheckpointState.DAMAGED:
        root = path.parent if layout.has_sidecar(storage, path) else path
        missing = layout.manifest_path(storage, path).relative_to(root)
        raise CheckpointDamaged(f"{missing} is missing, though the rest of the checkpoint is there", path=path)
    is_lost = history.has(path.name) and not storage.is_link(path)
    found = None if is_lost else foreign.step(path)
    if is_lost or (found is not None and history.has_unnamed(found.step)):
        raise CheckpointDamaged(
            f"its {layout.EXTRAS} directory is missing, and according to the journal this run committed it with one",
            path=path,
        )
    return found
