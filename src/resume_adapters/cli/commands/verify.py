"""``verify``: every file of the checkpoints against its manifest, digest by digest."""

from __future__ import annotations

import json as json_module
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer
import xxhash
from rich.console import Console, RenderableType
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from resume_adapters.cli import run_directory
from resume_adapters.cli.app import EXIT_CODES, Document, Json, Place, app, complete_checkpoint, show
from resume_adapters.cli.render import size, state, table
from resume_adapters.cli.run_directory import STORAGE, chosen_copies, open_url
from resume_adapters.cli.text import escape
from resume_adapters.core.checkpoint import layout
from resume_adapters.core.checkpoint.checkpoint import CheckpointInfo
from resume_adapters.core.checkpoint.files import CheckpointFiles, extra_in_words
from resume_adapters.core.checkpoint.manifest import Manifest
from resume_adapters.core.checkpoint.native_files import require_intact, weight_shards
from resume_adapters.core.checkpoint.validity import check_digests, check_sizes, read_manifest
from resume_adapters.core.tiers.options import is_url
from resume_adapters.core.tiers.remote import RemoteTier
from resume_adapters.core.tiers.tier import TierCheckpoint
from resume_adapters.errors import CheckpointDamaged, FormatTooNew

_READABLE = "readable"
"""The verdict on a checkpoint without digests, whose files have the structure of their formats."""

_ARCHIVES = (".pt", ".pth", ".bin", ".ckpt")
_PICKLE = b"\x80"

Checks = Iterable[tuple[str, int, str]]
"""The files of a checkpoint, each with its bytes, and with what is wrong with it."""

Advance = Callable[[str, int], object]
"""Is called with each file and its bytes, after it was read."""


@app.command(epilog=EXIT_CODES)
def verify(
    run_dir: Place,
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
    if is_url(run_dir):
        place, tier = run_dir, open_url(run_dir)
        copies = chosen_copies(tier, checkpoints or [])
        found = [_verdict(each.name, "valid", _of_copy(tier, each)) for each in copies]
    else:
        run = run_directory.read(Path(run_dir))
        place = run.place
        known = [row for row in run.rows if row.state in ("committed", "damaged", "foreign")]
        found = _verify_all([run.checkpoint(name) for name in checkpoints or []] or known)
    show({"run_directory": place, "checkpoints": found}, json, _in_words)
    raise typer.Exit(0 if found and all(each["verdict"] in ("valid", _READABLE) for each in found) else 1)


def _verify_all(rows: list[CheckpointInfo]) -> list[Document]:
    """Verify with a progress bar on standard error, if that is a terminal."""
    errors = Console(stderr=True)
    if not errors.is_terminal:  # before rich 14.3 even a bar that is disabled ends in an empty line
        return [_verify(row, lambda file, count: None) for row in rows]
    total = sum(manifest.bytes for row in rows if (manifest := _manifest_of(row)) is not None)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=errors, transient=True) as progress:
        task = progress.add_task("reading", total=total)
        return [
            _verify(row, lambda file, count: progress.update(task, advance=count, description=file)) for row in rows
        ]


def _verify(row: CheckpointInfo, advance: Advance) -> Document:
    name, manifest = row.path.name, _manifest_of(row)
    if manifest is not None:
        extra = CheckpointFiles(STORAGE, row.path, manifest).extra()
        return _verdict(name, "valid", _of_manifest(row.path, manifest, advance), extra)
    if row.state == "foreign":
        found = _verdict(name, _READABLE, _of_structure(row.path))
        return found if found["files"] else {**found, "verdict": "foreign"}
    found = _verdict(name, row.state, ())
    if row.state == "damaged":
        file = layout.manifest_path(STORAGE, row.path).relative_to(row.path).as_posix() if row.path.is_dir() else ""
        found["damage"] = [{"file": file, "reason": row.reason}]
    return found


def _manifest_of(row: CheckpointInfo) -> Manifest | None:
    """Return the manifest of a checkpoint, damaged or not; ``None`` if it cannot be read."""
    if row.manifest is not None or row.state != "damaged":
        return row.manifest
    try:
        return read_manifest(STORAGE, row.path)
    except (CheckpointDamaged, FormatTooNew):
        return None


def _verdict(name: str, undamaged: str, checks: Checks, extra: list[str] | None = None) -> Document:
    """Describe a checkpoint; ``extra`` are files that its manifest does not name: nothing reads them."""
    checked = list(checks)
    damage = [{"file": file, "reason": reason} for file, _, reason in checked if reason]
    return {
        "name": name,
        "verdict": "damaged" if damage else undamaged,
        "files": len(checked),
        "bytes": sum(count for _, count, _ in checked),
        "damage": damage,
        "extra": extra or [],
    }


def _of_manifest(checkpoint: Path, manifest: Manifest, advance: Advance) -> Iterator[tuple[str, int, str]]:
    for entry in manifest.files:
        reason = ""
        try:
            check_sizes(STORAGE, checkpoint, msgspec.structs.replace(manifest, files=(entry,)))
            for _ in check_digests(STORAGE, checkpoint, (entry,)):
                pass
        except CheckpointDamaged as error:
            reason = str(error)
        advance(f"{checkpoint.name}/{entry.path}", entry.bytes)
        yield entry.path, entry.bytes, reason


def _of_copy(tier: RemoteTier, found: TierCheckpoint) -> Iterator[tuple[str, int, str]]:
    for entry in found.manifest.files:
        hasher, reason = xxhash.xxh3_128(), ""
        try:
            for piece in tier.read(found, entry):
                hasher.update(piece)
            if (digest := hasher.hexdigest()) != entry.digest:
                said = f"{entry.path} has the digest {digest}, its manifest says {entry.digest}"
                reason = f"{said}: its content has changed"
        except CheckpointDamaged as error:
            reason = str(error)
        yield entry.path, entry.bytes, reason


def _of_structure(checkpoint: Path) -> Iterator[tuple[str, int, str]]:
    """Check that no file of a checkpoint without digests is torn, and that no shard of its weights is missing."""
    files = CheckpointFiles(STORAGE, checkpoint, None)
    for name, path in layout.files(STORAGE, checkpoint):
        reason = ""
        try:
            if path.suffix == ".json":
                _require_json(path)
            elif path.suffix == ".safetensors" or (path.suffix in _ARCHIVES and not _is_bare_pickle(path)):
                require_intact(path)
            if path.name.endswith(".index.json"):
                weight_shards(files, name.as_posix())
        except CheckpointDamaged as error:
            reason = str(error)
        yield name.as_posix(), STORAGE.size(path), reason


def _require_json(file: Path) -> None:
    try:
        json_module.loads(STORAGE.read(file))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"{file.name} is torn: {error}", path=file) from error


def _is_bare_pickle(file: Path) -> bool:
    """Return whether a file is what torch wrote before 1.6, and other tools still do: nothing says where it ends."""
    with file.open("rb") as opened:
        return opened.read(1) == _PICKLE


def _in_words(document: Document) -> Iterator[RenderableType]:
    rows = document["checkpoints"]
    found = table("name", "verdict", "files", "size", right=("files", "size"))
    for row in rows:
        found.add_row(escape(row["name"]), state(row["verdict"]), str(row["files"]), size(row["bytes"]))
    yield found if rows else "There is no checkpoint to verify."
    for row in rows:
        said = f"{escape(row['name'])} is {state(row['verdict'])}"
        yield from (f"{said}: {escape(damage['reason'])}" for damage in row["damage"])
        if row["extra"]:
            extra = escape(extra_in_words(row["extra"]))
            yield f"{escape(row['name'])}: its manifest does not name {extra}, which is not read"
        if row["verdict"] == _READABLE:
            checked = "only the structure of its files was checked"
            yield f"{said}: it was made without this package and has no digests; {checked}"
        elif row["verdict"] not in ("valid", "damaged"):
            yield f"{said}: it has no manifest to compare with"
