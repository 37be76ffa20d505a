"""``diff``: whether a resume would restore the same from two checkpoints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from resume_adapters.cli import documents, render, run_directory
from resume_adapters.cli.app import EXIT_CODES, Json, app, console
from resume_adapters.cli.difference import STATE_FILES, differences
from resume_adapters.cli.documents import Side
from resume_adapters.cli.run_directory import STORAGE, ForeignNames
from resume_adapters.core.checkpoint.catalog import FILE_SUFFIX
from resume_adapters.core.checkpoint.layout import CONTROL, CheckpointState, has_sidecar, is_committed, state_of
from resume_adapters.core.checkpoint.manifest import Manifest
from resume_adapters.core.checkpoint.validity import read_manifest
from resume_adapters.errors import NoValidCheckpoint, RunDirectoryUnusable, UnsupportedSetting

_HELP = "A checkpoint, or a run directory: its newest valid checkpoint."


@app.command(epilog=f"{EXIT_CODES} For diff, 1 also means that the states differ.")
def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help=_HELP)],
    b: Annotated[Path, typer.Argument(metavar="B", help=f"{_HELP} Or the name or step of one beside A.")],
    json: Json = False,
) -> None:
    """Compare what a resume would restore from two checkpoints: tensors by dtype, shape and digest, values as they are.

    When, where and with which settings a checkpoint was saved does not count. No code of a checkpoint is run.
    """
    sides = [_choose(a, a), _choose(b, a)]
    found = differences(STORAGE, sides[0].path, sides[1].path)
    document = documents.difference(sides[0], sides[1], found)
    if json:
        documents.write(document)
    else:
        render.difference(console(), document)
    raise typer.Exit(1 if found else 0)


def _choose(path: Path, first: Path) -> Side:
    """Return the checkpoint that an argument means.

    Args:
        path: the argument.
        first: the first of the two, beside which the other may be.

    Raises:
        RunDirectoryUnusable: it is neither a checkpoint nor a run directory.
        NoValidCheckpoint: it is a run directory without a valid checkpoint.
    """
    if not os.path.lexists(path) and len(path.parts) == 1:
        first = Path(os.path.realpath(first))
        directory = first.parent if _is_checkpoint(first) else first
        path = _beside(directory, path.name) or path
    path = Path(os.path.realpath(path)) if path.exists() else path
    if _is_checkpoint(path):
        manifest = _manifest(path)
        bare = None if manifest else ForeignNames().step(path)
        return Side(path, manifest.step if manifest else bare.step if bare else None, is_newest=False)
    if path.is_file():
        raise RunDirectoryUnusable(f"{path} is not a checkpoint; expected one, or a run directory", path=path)
    run = run_directory.read(path)
    if run.anchor is None:
        raise NoValidCheckpoint(f"{run.path} has no valid checkpoint to compare", path=run.path)
    return Side(Path(os.path.realpath(run.anchor.path)), run.anchor.step, is_newest=True)


def _beside(directory: Path, named: str) -> Path | None:
    """Return the checkpoint of a run directory with a name or step; ``None`` if there is none."""
    if os.path.lexists(directory / named):
        return directory / named
    try:
        return run_directory.read(directory).checkpoint(named).path
    except (RunDirectoryUnusable, UnsupportedSetting):
        return None


def _manifest(path: Path) -> Manifest | None:
    return read_manifest(STORAGE, path) if is_committed(STORAGE, path) else None


def _is_checkpoint(path: Path) -> bool:
    """Return whether a path is a checkpoint, of this package or of the bare framework, and not a run directory."""
    if path.is_file():
        return path.name.endswith(FILE_SUFFIX) or has_sidecar(STORAGE, path)
    if state_of(STORAGE, path) not in (CheckpointState.FOREIGN, CheckpointState.REMOVED):
        return True
    if not path.is_dir() or (path / CONTROL).is_dir():
        return False
    entries = STORAGE.entries(path)
    is_run_directory = any(ForeignNames().step(path / each.name) is not None for each in entries)
    return not is_run_directory and any(each.name.endswith(STATE_FILES) for each in entries)
