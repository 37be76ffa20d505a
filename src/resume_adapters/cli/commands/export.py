"""``export``: the plain weights of a checkpoint of any framework, in one safetensors file."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from resume_adapters.cli import portable, run_directory
from resume_adapters.cli.app import EXIT_CODES, MOVE, Json, Named, RunDir, app, show
from resume_adapters.cli.render import tracked
from resume_adapters.cli.run_directory import STORAGE, RunDirectory, require_intact
from resume_adapters.core.checkpoint.checkpoint import CheckpointInfo
from resume_adapters.core.checkpoint.distributed_metadata import SHARD
from resume_adapters.core.checkpoint.files import CheckpointFiles
from resume_adapters.core.checkpoint.native_files import weight_shards
from resume_adapters.errors import CheckpointDamaged, NoValidCheckpoint, UnsupportedSetting
from resume_adapters.integrations.deepspeed_engine import names

_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_SINGLE = (
    "model.safetensors",
    "pytorch_model.bin",
    "pytorch_model_fsdp.bin",
    "adapter_model.safetensors",
    "adapter_model.bin",
    "fabric.ckpt",
    "training.pt",
)

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


@app.command(rich_help_panel=MOVE, epilog=EXIT_CODES)
def export(
    run_dir: RunDir,
    checkpoint: Named = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The file to write; must be new.")] = (
        Path("model.safetensors")
    ),
    best: Annotated[bool, typer.Option("--best", help="The best checkpoint, according to the run.")] = False,
    shard_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Write a directory with files of at most SIZE, such as 5GB, and an index."),
    ] = None,
    json: Json = False,
) -> None:
    """Write the weights of a checkpoint to one safetensors file, by their names without wrappers.

    The digests of the files are verified first. The run directory is not changed. Weights that FSDP2 sharded are merged
    one at a time. Only torch is needed, no framework; but DeepSpeed is needed to merge what its ZeRO sharded, in single
    precision.
    """
    limit = None if shard_size is None else _bytes(shard_size)
    run = run_directory.read(run_dir)
    row = _choose(run, checkpoint, best)
    if os.path.lexists(output):
        raise UnsupportedSetting(f"{output} already exists: name another file with --output, or remove it")
    files = _weight_files(row)
    _require_all_shards(row, files)
    _verify(row, files)
    with _weights(row, files) as weights:
        facts = {"format": "pt", "checkpoint": row.path.name, "step": str(row.step)}
        written = portable.write(weights, output, facts, limit)
    found = {"run_directory": run.place, "checkpoint": row.path.name, "step": row.step}
    show({**found, "output": str(output), "tensors": len(weights), "bytes": written}, json)


def _bytes(text: str) -> int:
    given = re.fullmatch(r"(\d+) ?([KMG]B|)", text.strip().upper())
    if given is None or int(given[1]) == 0:
        raise UnsupportedSetting(f"--shard-size is {text!r}; expected a number with KB, MB or GB, such as 5GB")
    return int(given[1]) * _UNITS[given[2]]


def _choose(run: RunDirectory, name: str | None, best: bool) -> CheckpointInfo:
    """Return the checkpoint to export: a valid one."""
    wanted = run.best(None) if best else name
    if best and wanted is None:
        raise UnsupportedSetting(f"the run in {run.path} does not say which checkpoint is its best")
    found = run.anchor if wanted is None else run.checkpoint(wanted)
    if found is None:
        raise NoValidCheckpoint(f"{run.path} has no valid checkpoint to export", path=run.path)
    if found.step is None:
        raise UnsupportedSetting(f"{found.path} is {found.state}; expected a valid checkpoint")
    return found


def _weight_files(row: CheckpointInfo) -> list[Path]:
    """Return the files that hold the weights of a checkpoint's model; what is sharded lies in the first ones."""
    checkpoint = row.path
    if checkpoint.is_file():
        return [checkpoint]
    files = CheckpointFiles(STORAGE, checkpoint, row.manifest)
    for index in _INDEXES:
        if (found := files.find(index)) is not None:
            return [found, *weight_shards(files, index)]
    for name in _SINGLE:
        if (found := files.find(name)) is not None:
            return [found]
    if extra := [name for name in files.extra() if name.endswith("_states.pt")]:
        raise CheckpointDamaged(
            f"{checkpoint.name} has a file {extra[0]} that is not in its manifest: move it out of the checkpoint",
            path=checkpoint,
        )
    states = sorted(checkpoint.rglob("*_states.pt"))
    shards = [path for path in states if names.SHARD.fullmatch(path.name)]
    if of_engine := [*shards, *(path for path in states if path.name == names.MODEL)]:
        return of_engine
    if sharded := sorted(path for path in checkpoint.rglob("*") if SHARD.fullmatch(path.name)):
        return sharded
    known = ", ".join((*_SINGLE, names.MODEL))
    raise UnsupportedSetting(f"{checkpoint.name} has no file of weights; expected one of {known}")


def _require_all_shards(row: CheckpointInfo, files: list[Path]) -> None:
    """Refuse the shards of some ranks, where other nodes have those of the others."""
    here = row.manifest.ranks if row.manifest else None
    if row.manifest is not None and here is not None and names.SHARD.fullmatch(files[0].name):
        raise UnsupportedSetting(
            f"{row.path} holds the shards of the ranks {', '.join(map(str, here))} of {row.manifest.world_size}, and "
            f"the disks of other nodes hold the others: copy the files of all nodes' {row.path.name} into one "
            "directory, and merge them there with DeepSpeed's zero_to_fp32.py"
        )


def _verify(row: CheckpointInfo, files: list[Path]) -> None:
    """Compare the files with their manifest, if there is one."""
    if row.manifest is None:
        return
    paths = {file.name if file == row.path else file.relative_to(row.path).as_posix() for file in files}
    for entry in tracked(row.path.name, [entry for entry in row.manifest.files if entry.path in paths]):
        require_intact(row.path, row.manifest, (entry,))


def _weights(
    row: CheckpointInfo, files: list[Path]
) -> contextlib.AbstractContextManager[Mapping[str, portable.Weight]]:
    """Return the weights in these files, which are open within the context."""
    if SHARD.fullmatch(files[0].name):
        return portable.of_shards(CheckpointFiles(STORAGE, row.path, row.manifest))
    if names.SHARD.fullmatch(files[0].name):
        return contextlib.nullcontext(portable.of_zero(files[0].parent))
    return contextlib.nullcontext(portable.of_files(file for file in files if file.suffix != ".json"))
