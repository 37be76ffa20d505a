"""``verify``: every file of the committed checkpoints against its manifest, digest by digest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from resume_adapters.cli import documents, remote, render, run_directory
from resume_adapters.cli.app import EXIT_CODES, Json, OnePlace, app, complete_checkpoint, console
from resume_adapters.cli.documents import Damage, Verdict
from resume_adapters.cli.run_directory import STORAGE, RunDirectory
from resume_adapters.cli.structure import verify_structure
from resume_adapters.core.checkpoint.checkpoint import CheckpointInfo
from resume_adapters.core.checkpoint.files import CheckpointFiles
from resume_adapters.core.checkpoint.layout import manifest_path
from resume_adapters.core.checkpoint.manifest import Manifest
from resume_adapters.core.checkpoint.validity import check_digests, check_sizes, read_manifest
from resume_adapters.errors import CheckpointDamaged, FormatTooNew

_VERIFIED = ("committed", "damaged", "foreign")
"""The states of checkpoints that are verified where none is named."""


@app.command(epilog=EXIT_CODES)
def verify(
    run_dir: OnePlace,
    checkpoints: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CHECKPOINT]...", help="Names or steps; by default all.", autocompletion=complete_checkpoint
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Read every file of the committed checkpoints and compare it with the manifest's digest.

    A checkpoint that was made without this package has no digests. Of that one, only the structure of the files is
    checked: nothing is torn, and every shard of the weights is there. Its verdict is then readable, not valid. The
    copies at a URL are read as a whole too.
    """
    if run_dir.is_url:
        tier = remote.open_url(run_dir.text)
        found = [remote.verify(tier, each) for each in remote.chosen(tier, checkpoints or [])]
    else:
        run = run_directory.read(run_dir.path)
        found = _verify_all(_choose(run, checkpoints or []))
    document = documents.verdicts(run_dir.text if run_dir.is_url else str(run.path), found)
    if json:
        documents.write(document)
    else:
        render.verdicts(console(), document)
    all_valid = bool(found) and all(each.verdict in ("valid", documents.READABLE) for each in found)
    raise typer.Exit(0 if all_valid else 1)


def _choose(run: RunDirectory, names: list[str]) -> list[CheckpointInfo]:
    """Return the checkpoints to verify: the named ones, or all that were ever committed.

    Raises:
        UnsupportedSetting: the run directory has no checkpoint of that name or step.
    """
    known = [row for row in run.rows if row.state in _VERIFIED]
    return [run.checkpoint(name) for name in names] or known


def _verify_all(rows: list[CheckpointInfo]) -> list[Verdict]:
    """Verify with a progress bar on standard error, if that is a terminal."""
    errors = Console(stderr=True)
    if not errors.is_terminal:  # before rich 14.3 even a bar that is disabled ends in an empty line
        return [_verify(row, lambda file, count: None) for row in rows]
    total = sum(manifest.bytes for row in rows if (manifest := _manifest_of(row)) is not None)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=errors, transient=True) as progress:
        task = progress.add_task("reading", total=total)

        def advance(file: str, count: int) -> None:
            progress.update(task, advance=count, description=file)

        return [_verify(row, advance) for row in rows]


def _verify(row: CheckpointInfo, advance: Callable[[str, int], object]) -> Verdict:
    """Read a checkpoint's files, and list each one that differs from its manifest.

    Args:
        row: the checkpoint.
        advance: called with each file and its bytes, after it was read.
    """
    manifest = _manifest_of(row)
    if manifest is None:
        if row.state == "foreign":
            return verify_structure(row.path)
        if row.state != "damaged":
            return Verdict(row.path.name, row.state)
        file = manifest_path(STORAGE, row.path).relative_to(row.path).as_posix() if row.path.is_dir() else ""
        return Verdict(row.path.name, "damaged", damage=(Damage(file, row.reason),))
    damage = []
    for entry in manifest.files:
        try:
            check_sizes(STORAGE, row.path, msgspec.structs.replace(manifest, files=(entry,)))
            for _ in check_digests(STORAGE, row.path, (entry,)):
                pass
        except CheckpointDamaged as error:
            damage.append(Damage(entry.path, str(error)))
        advance(f"{row.path.name}/{entry.path}", entry.bytes)
    verdict = "damaged" if damage else "valid"
    extra = CheckpointFiles(STORAGE, row.path, manifest).extra()
    return Verdict(row.path.name, verdict, len(manifest.files), manifest.bytes, tuple(damage), tuple(extra))


def _manifest_of(row: CheckpointInfo) -> Manifest | None:
    """Return the manifest of a checkpoint, damaged or not; ``None`` if it cannot be read."""
    if row.manifest is not None or row.state != "damaged":
        return row.manifest
    try:
        return read_manifest(STORAGE, row.path)
    except (CheckpointDamaged, FormatTooNew):
        return None
