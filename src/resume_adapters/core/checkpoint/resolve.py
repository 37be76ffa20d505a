"""Latest valid: which checkpoint a run resumes from, what was rejected, and why. Reads only.

Whatever ``latest`` says is a hint for people: every candidate in the run directory is considered, newest step first,
and the first that is valid on every rank is taken.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from resume_adapters.core.checkpoint.catalog import candidates, newest_first, sort_key
from resume_adapters.core.checkpoint.checkpoint import Checkpoint, RejectedCheckpoint, ResumeChoice
from resume_adapters.core.checkpoint.layout import is_committed, is_pending, original_path
from resume_adapters.core.checkpoint.manifest import Manifest
from resume_adapters.core.checkpoint.validity import (
    ForeignDetector,
    check_digests,
    check_sizes,
    foreign_step,
    is_alias,
    read_manifest,
    require_in_run_directory,
)
from resume_adapters.core.ranks import Ranks, run_on_all_ranks
from resume_adapters.core.storage.base import Storage
from resume_adapters.core.storage.groups import StorageGroup
from resume_adapters.errors import CheckpointDamaged, FormatTooNew, NoValidCheckpoint, UnsupportedSetting


def latest_valid(
    storage: Storage, ranks: Ranks, sharing: StorageGroup, run_directory: Path, foreign: ForeignDetector
) -> ResumeChoice:
    """Choose the newest checkpoint that is valid on every rank, in whatever directory it has. Every rank must ask.

    Raises:
        NoValidCheckpoint: there are checkpoints, and none is valid.
        FormatTooNew: the newest committed one was written by a later version; an older one is not taken in its place.
        PeerFailed: another rank could not look.
    """
    seen = run_on_all_ranks(ranks, lambda: _sort_keys(storage, run_directory), "list the run directory")
    claims = {name: claimed for of_rank in reversed(seen) for name, claimed in of_rank.items()}
    rejected: list[RejectedCheckpoint] = []
    for name in sorted(claims, key=lambda name: newest_first(name, *claims[name])):
        path = run_directory / name
        answers = run_on_all_ranks(
            ranks, functools.partial(_validate_here, storage, sharing, path, foreign), f"check {name}"
        )
        reason = _disagreement(answers)
        if reason is not None:
            rejected.append(RejectedCheckpoint(path, reason))
        elif (step := answers[0].step) is not None:
            return ResumeChoice(Checkpoint(_local_name(path), step, answers[ranks.rank].manifest), tuple(rejected))
    if rejected:
        raise no_valid(run_directory, rejected)
    return ResumeChoice(None, ())


def _sort_keys(storage: Storage, run_directory: Path) -> dict[str, tuple[int, float]]:
    return {path.name: sort_key(storage, path) for path in candidates(run_directory) if not is_alias(path)}


def _local_name(path: Path) -> Path:
    """Return where this directory has a candidate: what stepped aside in another node's may not have done so here."""
    return original_path(path) if is_committed(original_path(path)) and not is_committed(path) else path


@dataclass(frozen=True)
class _Answer:
    """What one rank says of a candidate: its step where it is valid, what is wrong with it, or neither: it is none."""

    step: int | None = None
    damage: str | None = None
    absence: str = ""
    manifest: Manifest | None = None

    @property
    def save(self) -> tuple[int, float] | None:
        """Which save it is of: other nodes have their part of the same."""
        return (self.manifest.generation, self.manifest.written) if self.manifest else None


def _disagreement(answers: list[_Answer]) -> str | None:
    """Return why the ranks cannot resume from a candidate together; ``None`` where they can, or it is none to any."""
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


def _validate_here(storage: Storage, sharing: StorageGroup, path: Path, foreign: ForeignDetector) -> _Answer:
    path = _local_name(path)
    try:
        if is_pending(path):
            return _Answer(absence="was begun and never committed")
        if not is_committed(path):
            return _validate_foreign(path, foreign)
        manifest = read_manifest(storage, path)
        check_sizes(path, manifest)
        mine = tuple(entry for entry in manifest.files if sharing.answering(entry.rank) == sharing.rank)
        for _ in check_digests(storage, path, mine):
            pass
        return _Answer(manifest.step, manifest=manifest)
    except CheckpointDamaged as damage:
        return _Answer(damage=str(damage))
    except FormatTooNew as error:
        raise FormatTooNew(f"{path}: {error}", path=path) from error


def _validate_foreign(path: Path, foreign: ForeignDetector) -> _Answer:
    """Judge what has no manifest. Most of it is no checkpoint: the user's own directories, and links to them."""
    if not path.exists() and not path.is_symlink():
        return _Answer(absence="is not there")
    step = foreign_step(path, foreign)
    if step is not None:
        require_in_run_directory(path)
    return _Answer(step)


def no_valid(run_directory: Path, rejected: list[RejectedCheckpoint]) -> NoValidCheckpoint:
    """Return the error that lists what was found and why none of it can be resumed from."""
    lines = "".join(f"\n  {each.path.name}: {each.reason}" for each in rejected)
    return NoValidCheckpoint(
        f"{run_directory} holds checkpoints, but none is valid:{lines}\n"
        'Repair one of them, or pass resume="scratch!" to set them aside and start from zero.',
        path=run_directory,
    )


def open_checkpoint(storage: Storage, path: Path, foreign: ForeignDetector) -> Checkpoint:
    """Check the checkpoint that a user names as the start of a run that has none of its own.

    Raises:
        UnsupportedSetting: there is nothing of that name.
        CheckpointDamaged: it is no checkpoint, or not a valid one.
    """
    if not path.exists():
        raise UnsupportedSetting(
            f'resume={str(path)!r} is not there; expected "auto", "scratch", "scratch!" or a checkpoint',
            path=path,
        )
    try:
        if not is_committed(path):
            step = foreign_step(path, foreign)
            if step is None:
                raise CheckpointDamaged("it is not a checkpoint")
            return Checkpoint(path, step, None)
        manifest = read_manifest(storage, path)
        check_sizes(path, manifest)
        for _ in check_digests(storage, path, manifest.files):
            pass
        return Checkpoint(path, manifest.step, manifest)
    except CheckpointDamaged as damage:
        raise CheckpointDamaged(f"cannot start from {path}: {damage}", path=path) from damage
