"""Choose the checkpoint to resume from: the newest that is valid on every rank. Reads only.

``latest`` is only a hint for people: every candidate in the run directory is tried, newest step first, and the first
one that is valid on every rank is taken. What was not committed, as what a script saves itself, comes after all that
was: it lacks what an exact resume needs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from resume_adapters.core.checkpoint.catalog import FOREIGN, Catalog, candidates, newest_first, sort_key
from resume_adapters.core.checkpoint.checkpoint import Checkpoint, RejectedCheckpoint, ResumeChoice
from resume_adapters.core.checkpoint.files import CheckpointFiles
from resume_adapters.core.checkpoint.layout import CheckpointState, is_committed, original_path, state_of
from resume_adapters.core.checkpoint.manifest import Manifest
from resume_adapters.core.checkpoint.parts import require_readable
from resume_adapters.core.checkpoint.validity import (
    CommitHistory,
    ForeignDetector,
    check_digests,
    check_sizes,
    foreign_step,
    is_alias,
    read_manifest,
    require_in_run_directory,
)
from resume_adapters.core.ranks import Ranks, run_on_all_ranks
from resume_adapters.core.storage.base import Storage, is_present
from resume_adapters.core.storage.groups import StorageGroup
from resume_adapters.errors import (
    CheckpointDamaged,
    FormatTooNew,
    NoValidCheckpoint,
    ResumeError,
    RunDirectoryUnusable,
    UnsupportedSetting,
)

T = TypeVar("T")


def latest_valid(
    catalog: Catalog,
    ranks: Ranks,
    storage_group: StorageGroup,
    foreign: ForeignDetector,
    history: CommitHistory,
    require_usable: Callable[[Checkpoint], object] = bool,
    proved: tuple[str, Manifest] | None = None,
) -> ResumeChoice:
    """Return the newest checkpoint that is valid on every rank. Every rank calls it.

    Args:
        catalog: the checkpoints of the run directory.
        ranks: the ranks of the run.
        storage_group: the ranks that share the run directory.
        foreign: recognises the checkpoints of the bare framework.
        history: what the run has committed, the same on all ranks that share the run directory.
        require_usable: raises :class:`CheckpointDamaged` where what this rank saved cannot be used.
        proved: the name and the manifest of a checkpoint whose files this rank has written just now, and of which it
            has compared the digests with the manifest as it wrote them: they are not read again for that.

    Raises:
        NoValidCheckpoint: there are checkpoints, and none is valid.
        FormatTooNew: the newest committed one was written by a later version; an older one is not taken instead.
        PeerFailed: another rank could not list the run directory or check a checkpoint.
    """
    storage, run_directory = catalog.storage, catalog.directory
    seen = run_on_all_ranks(
        ranks,
        lambda: _readable(run_directory, lambda: _sort_keys(catalog, foreign, history)),
        "list the run directory",
    )
    keys = {name: key for of_rank in reversed(seen) for name, key in of_rank.items()}
    rejected: list[RejectedCheckpoint] = []
    validate = functools.partial(_validate_here, storage, storage_group, foreign, history, require_usable, proved)
    for name in sorted(keys, key=lambda name: newest_first(name, *keys[name])):
        path = run_directory / name
        answers = run_on_all_ranks(
            ranks, functools.partial(_readable, path, functools.partial(validate, path)), f"check {name}"
        )
        reason = _disagreement(answers)
        if reason is not None:
            rejected.append(RejectedCheckpoint(path, reason))
        elif (step := answers[0].step) is not None:
            chosen = Checkpoint(_local_name(storage, path), step, answers[ranks.rank].manifest)
            later = [each for each, (rank, of_content) in keys.items() if rank == FOREIGN and of_content > step]
            return ResumeChoice(chosen, tuple(rejected), tuple(sorted(later)) if chosen.manifest else ())
    if rejected:
        raise no_valid(run_directory, rejected)
    return ResumeChoice(None, ())


def _sort_keys(catalog: Catalog, foreign: ForeignDetector, history: CommitHistory) -> dict[str, tuple[int, float]]:
    storage = catalog.storage
    return {
        path.name: sort_key(storage, path, foreign, history, catalog.summary)
        for path in candidates(storage, catalog.directory)
        if not is_alias(storage, path)
    }


def _local_name(storage: Storage, path: Path) -> Path:
    """Return the path of a candidate in this node's directory: it may be superseded in another node's only."""
    original = original_path(path)
    return original if is_committed(storage, original) and not is_committed(storage, path) else path


@dataclass(frozen=True)
class _Answer:
    """What one rank finds at a candidate: the step if it is valid, the damage, or neither: not a checkpoint."""

    step: int | None = None
    damage: str | None = None
    absence: str = ""
    manifest: Manifest | None = None

    @property
    def save(self) -> tuple[int, float] | None:
        """Identifies the save: all nodes must have their part of the same one."""
        return (self.manifest.generation, self.manifest.written) if self.manifest else None


def _disagreement(answers: list[_Answer]) -> str | None:
    """Return why the ranks cannot resume from a candidate; ``None`` if all ranks agree, or none sees a checkpoint."""
    for rank, answer in enumerate(answers):
        if answer.damage is not None:
            return answer.damage if len(answers) == 1 else f"rank {rank}: {answer.damage}"
    steps = [answer.step for answer in answers]
    if len(set(steps)) > 1:
        for rank, answer in enumerate(answers):
            if answer.absence:
                return f"rank {rank}: {answer.absence}"
        return f"the ranks see different checkpoints of that name: steps {steps}"
    if len({answer.save for answer in answers}) > 1:
        return f"the ranks see different saves of step {steps[0]} under that name"
    return None


def _readable(path: Path, work: Callable[[], T]) -> T:
    """Translate what the system says of a path that may not be read.

    Raises:
        RunDirectoryUnusable: it may not.
    """
    try:
        return work()
    except OSError as error:
        if isinstance(error, ResumeError):
            raise
        raise RunDirectoryUnusable(
            f"{path} cannot be read: {error}. Fix its permissions, or move it out of the run directory", path=path
        ) from error


def _validate_here(
    storage: Storage,
    storage_group: StorageGroup,
    foreign: ForeignDetector,
    history: CommitHistory,
    require_usable: Callable[[Checkpoint], object],
    proved: tuple[str, Manifest] | None,
    path: Path,
) -> _Answer:
    path = _local_name(storage, path)
    try:
        state = state_of(storage, path)
        if state is CheckpointState.PENDING:
            return _Answer(absence="was begun and never committed")
        if state is not CheckpointState.COMMITTED:
            return _validate_foreign(storage, path, foreign, history)
        manifest = read_manifest(storage, path)
        if manifest.weights_only:
            return _Answer(damage=_WEIGHTS_ONLY)
        check_sizes(storage, path, manifest)
        mine = tuple(
            entry for entry in manifest.files if storage_group.owner_in_group(entry.rank) == storage_group.rank
        )
        if proved != (path.name, manifest):
            with ThreadPoolExecutor() as pool:  # one thread reads slower than the disk or the memory delivers
                check_digests(storage, path, mine, pool.map)
        require_readable(CheckpointFiles(storage, path, manifest), mine)
        require_usable(Checkpoint(path, manifest.step, manifest))
        return _Answer(manifest.step, manifest=manifest)
    except CheckpointDamaged as damage:
        return _Answer(damage=str(damage))
    except FormatTooNew as error:
        raise FormatTooNew(f"{path}: {error}", path=path) from error


_WEIGHTS_ONLY = (
    "has weights alone: KeepWeights has dropped what else a run resumes from. To begin another run with them, load "
    "them in the script"
)


def _validate_foreign(storage: Storage, path: Path, foreign: ForeignDetector, history: CommitHistory) -> _Answer:
    """Validate what has no manifest. Most of it is not a checkpoint: the user's directories, and links to them."""
    if not is_present(storage, path):
        return _Answer(absence="is not there")
    found = foreign_step(storage, path, foreign, history)
    if found is None:
        return _Answer()
    require_in_run_directory(storage, path)
    foreign.require_whole(path)
    return _Answer(found.step)


def no_valid(run_directory: Path, rejected: list[RejectedCheckpoint]) -> NoValidCheckpoint:
    """Return the error that lists the checkpoints found, and why none of them is valid."""
    lines = "".join(f"\n  {each.path.name}: {each.reason}" for each in rejected)
    return NoValidCheckpoint(
        f"{run_directory} holds checkpoints, but none is valid:{lines}\n"
        'Repair one of them, or pass resume="scratch!" to set them aside and start from zero.',
        path=run_directory,
    )


def open_checkpoint(storage: Storage, path: Path, foreign: ForeignDetector, *, for_weights: bool = False) -> Checkpoint:
    """Verify and return the checkpoint at a path that a user gave.

    Args:
        storage: where to read.
        path: the checkpoint.
        foreign: recognises the checkpoints of the bare framework.
        for_weights: the weights are all that is read of it.

    Raises:
        UnsupportedSetting: there is nothing at that path, or nothing to resume from.
        CheckpointDamaged: it is not a checkpoint, or not a valid one.
    """
    if not storage.exists(path):
        raise UnsupportedSetting(
            f'resume={str(path)!r} is not there; expected "auto", "scratch", "scratch!" or a checkpoint',
            path=path,
        )
    try:
        if not is_committed(storage, path):
            found = foreign_step(storage, path, foreign, CommitHistory())
            if found is None:
                raise CheckpointDamaged("it is not a checkpoint")
            foreign.require_whole(path)
            return Checkpoint(path, found.step, None)
        manifest = read_manifest(storage, path)
        if manifest.weights_only and not for_weights:
            raise UnsupportedSetting(f"{path} {_WEIGHTS_ONLY}", path=path)
        check_sizes(storage, path, manifest)
        check_digests(storage, path, manifest.files)
        require_readable(CheckpointFiles(storage, path, manifest), manifest.files)
        return Checkpoint(path, manifest.step, manifest)
    except CheckpointDamaged as damage:
        raise CheckpointDamaged(f"cannot start from {path}: {damage}", path=path) from damage
