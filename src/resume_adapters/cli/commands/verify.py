"""``verify``: every file of the checkpoints against its manifest, digest by digest."""

from __future__ import annotations

import contextlib
import json as json_module
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
import xxhash
from rich.console import RenderableType

from resume_adapters.cli import run_directory
from resume_adapters.cli.app import EXIT_CODES, LOOK, Document, Json, Place, app, show
from resume_adapters.cli.render import escape, size, state, table, tracked
from resume_adapters.cli.run_directory import STORAGE, chosen_copies, open_url, require_intact
from resume_adapters.core.checkpoint import layout, native_files, validity
from resume_adapters.core.checkpoint.checkpoint import CheckpointInfo
from resume_adapters.core.checkpoint.files import CheckpointFiles, extra_in_words
from resume_adapters.core.checkpoint.manifest import FileEntry
from resume_adapters.core.tiers.options import is_url
from resume_adapters.core.tiers.remote import RemoteTier
from resume_adapters.core.tiers.tier import TierCheckpoint
from resume_adapters.errors import CheckpointDamaged

_READABLE = "readable"
"""The verdict on a checkpoint without digests, whose files have the structure of their formats."""

_ARCHIVES = (".pt", ".pth", ".bin", ".ckpt")

Check = tuple[str, int, Callable[[], None]]
"""A file of a checkpoint, its bytes, and what raises if it is damaged."""


@app.command(rich_help_panel=LOOK, epilog=EXIT_CODES)
def verify(
    run_dir: Place,
    checkpoints: Annotated[
        list[str] | None, typer.Argument(metavar="CHECKPOINT...", help="Names or steps; by default all.")
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
        found = []
        for copy in chosen_copies(tier, checkpoints or []):
            checks = [(each.path, each.bytes, partial(_require_copy, tier, copy, each)) for each in copy.manifest.files]
            found.append(_verdict(copy.name, "valid", checks))
    else:
        run = run_directory.read(Path(run_dir))
        place = run.place
        known = [row for row in run.rows if row.state != "pending"]
        found = list(map(_verify, [run.checkpoint(name) for name in checkpoints or []] or known))
    show({"run_directory": place, "checkpoints": found}, json, _in_words)
    raise typer.Exit(0 if found and all(each["verdict"] in ("valid", _READABLE) for each in found) else 1)


def _verify(row: CheckpointInfo) -> Document:
    name, path, manifest = row.path.name, row.path, row.manifest
    if row.state == "damaged":
        with contextlib.suppress(CheckpointDamaged):  # its manifest may be whole
            manifest = validity.read_manifest(STORAGE, path)
    if manifest is not None:
        checks = [(each.path, each.bytes, partial(require_intact, path, manifest, (each,))) for each in manifest.files]
        return _verdict(name, "valid", checks, CheckpointFiles(STORAGE, path, manifest).extra())
    if row.state == "foreign":
        files = [(each.as_posix(), file) for each, file in layout.files(STORAGE, path)]
        checks = [(each, STORAGE.size(file), partial(_require_structure, path, each, file)) for each, file in files]
        return _verdict(name, _READABLE if files else row.state, checks)
    found = _verdict(name, row.state, [])
    if row.state in ("damaged", "newer"):
        file = layout.manifest_path(STORAGE, path).relative_to(path).as_posix() if path.is_dir() else ""
        found["damage"] = [{"file": file, "reason": row.reason}]
    return found


def _verdict(name: str, undamaged: str, checks: Sequence[Check], extra: list[str] | None = None) -> Document:
    """Check a checkpoint and describe it; ``extra`` are files that its manifest does not name: nothing reads them."""
    damage = []
    for file, _, require in tracked(name, checks):
        try:
            require()
        except CheckpointDamaged as error:
            damage.append({"file": file, "reason": str(error)})
    return {
        "name": name,
        "verdict": "damaged" if damage else undamaged,
        "files": len(checks),
        "bytes": sum(count for _, count, _ in checks),
        "damage": damage,
        "extra": extra or [],
    }


def _require_copy(tier: RemoteTier, found: TierCheckpoint, entry: FileEntry) -> None:
    hasher = xxhash.xxh3_128()
    for piece in tier.read(found, entry):
        hasher.update(piece)
    if (digest := hasher.hexdigest()) != entry.digest:
        said = f"{entry.path} has the digest {digest}, its manifest says {entry.digest}"
        raise CheckpointDamaged(f"{said}: its content has changed")


def _require_structure(checkpoint: Path, name: str, file: Path) -> None:
    """Check that a file of a checkpoint without digests is not torn, and no shard of an index missing."""
    if file.suffix == ".json":
        try:
            json_module.loads(STORAGE.read(file))
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointDamaged(f"{file.name} is torn: {error}", path=file) from error
    elif file.suffix == ".safetensors" or (file.suffix in _ARCHIVES and not _is_bare_pickle(file)):
        native_files.require_intact(file)
    if name.endswith(".index.json"):
        native_files.weight_shards(CheckpointFiles(STORAGE, checkpoint, None), name)


def _is_bare_pickle(file: Path) -> bool:
    """Return whether a file is what torch wrote before 1.6, and other tools still do: nothing says where it ends."""
    with file.open("rb") as opened:
        return opened.read(1) == b"\x80"


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
        elif row["verdict"] not in ("valid", "damaged", "newer"):
            yield f"{said}: it has no manifest to compare with"
