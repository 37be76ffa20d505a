"""Every file of a checkpoint against its manifest, digest by digest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from resume_adapters.cli.run_directory import STORAGE, RunDirectory
from resume_adapters.core.checkpoint.checkpoint import CheckpointInfo
from resume_adapters.core.checkpoint.layout import manifest_path
from resume_adapters.core.checkpoint.manifest import Manifest
from resume_adapters.core.checkpoint.validity import check_digests, check_sizes, read_manifest
from resume_adapters.errors import CheckpointDamaged, FormatTooNew, UnsupportedSetting


@dataclass(frozen=True)
class Damage:
    """One file that is not as its manifest says. ``file`` is relative to the checkpoint; empty for the whole of it."""

    file: str
    reason: str


@dataclass(frozen=True)
class Verdict:
    """What became of one checkpoint. ``verdict`` is ``valid`` or ``damaged``, or the state that has no manifest."""

    name: str
    verdict: str
    files: int = 0
    bytes: int = 0
    damage: tuple[Damage, ...] = ()


def choose(run: RunDirectory, names: list[str]) -> list[CheckpointInfo]:
    """Return the checkpoints to verify: those named, or all that were ever committed.

    Raises:
        UnsupportedSetting: a name is no checkpoint of the run directory.
    """
    by_name = {row.path.name: row for row in run.rows}
    wanted = [Path(name).name for name in names]
    for name in wanted:
        if name not in by_name:
            raise UnsupportedSetting(f"there is no checkpoint {name} in {run.path}; it holds {', '.join(by_name)}")
    return [by_name[name] for name in wanted] or [row for row in run.rows if row.state in ("committed", "damaged")]


def manifest_of(row: CheckpointInfo) -> Manifest | None:
    """Return the manifest of a checkpoint, damaged or not; ``None`` where it cannot be read."""
    if row.manifest is not None or row.state != "damaged":
        return row.manifest
    try:
        return read_manifest(STORAGE, row.path)
    except (CheckpointDamaged, FormatTooNew):
        return None


def verify(row: CheckpointInfo, advance: Callable[[str, int], object]) -> Verdict:
    """Read a checkpoint's files and name every one that is not as its manifest says.

    Args:
        row: the checkpoint.
        advance: is told each file and its bytes, once it was read.
    """
    manifest = manifest_of(row)
    if manifest is None:
        if row.state != "damaged":
            return Verdict(row.path.name, row.state)
        file = manifest_path(row.path).relative_to(row.path).as_posix() if row.path.is_dir() else ""
        return Verdict(row.path.name, "damaged", damage=(Damage(file, row.reason),))
    damage = []
    for entry in manifest.files:
        try:
            check_sizes(row.path, msgspec.structs.replace(manifest, files=(entry,)))
            for _ in check_digests(STORAGE, row.path, (entry,)):
                pass
        except CheckpointDamaged as error:
            damage.append(Damage(entry.path, str(error)))
        advance(f"{row.path.name}/{entry.path}", entry.bytes)
    verdict = "damaged" if damage else "valid"
    return Verdict(row.path.name, verdict, len(manifest.files), manifest.bytes, tuple(damage))
