"""``export``: the plain weights of a checkpoint of any framework, in one safetensors file."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from resume_adapters.cli import run_directory
from resume_adapters.cli.app import EXIT_CODES, MOVE, Json, Named, RunDir, app, show
from resume_adapters.cli.render import tracked
from resume_adapters.cli.run_directory import STORAGE, RunDirectory, require_intact
from resume_adapters.core.checkpoint.checkpoint import CheckpointInfo
from resume_adapters.core.checkpoint.files import CheckpointFiles
from resume_adapters.core.checkpoint.native_files import weight_shards
from resume_adapters.core.state import keys, safe_load
from resume_adapters.core.state.stand_ins import stand_ins, standing_in
from resume_adapters.errors import CheckpointDamaged, MissingFramework, NoValidCheckpoint, UnsupportedSetting
from resume_adapters.integrations.deepspeed_engine import names

if TYPE_CHECKING:
    import torch

_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_SINGLE = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "adapter_model.bin")
_WEIGHT_KEYS = ("state_dict", "module")
"""The key of the weights in a file of Lightning, or of DeepSpeed, which holds more than weights."""


@app.command(rich_help_panel=MOVE, epilog=EXIT_CODES)
def export(
    run_dir: RunDir,
    checkpoint: Named = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The file to write; must be new.")] = (
        Path("model.safetensors")
    ),
    best: Annotated[bool, typer.Option("--best", help="The best checkpoint, according to the run.")] = False,
    json: Json = False,
) -> None:
    """Write the weights of a checkpoint to one safetensors file, by their names without wrappers.

    The digests of the files are verified first. The run directory is not changed. Only torch is needed, no framework;
    but DeepSpeed is needed to merge what its ZeRO sharded, in single precision. Other sharded weights are refused.
    """
    run = run_directory.read(run_dir)
    row = _choose(run, checkpoint, best)
    if os.path.lexists(output):
        raise UnsupportedSetting(f"{output} already exists: name another file with --output, or remove it")
    files = _weight_files(row)
    _require_all_shards(row, files)
    _verify(row, files)
    count, written = _write(_read(files), output, row)
    facts = {"run_directory": run.place, "checkpoint": row.path.name, "step": row.step}
    show({**facts, "output": str(output), "tensors": count, "bytes": written}, json)


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
    """Return the files that hold the weights of a checkpoint's model; of ZeRO, its shards come first."""
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
    sharded = next(checkpoint.rglob("*.distcp"), None)
    if sharded is not None:
        raise UnsupportedSetting(
            f"the weights of {checkpoint.name} are sharded over processes ({sharded.name}): merge them with the "
            "framework's own tool first (accelerate merge-weights)"
        )
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


def _read(files: list[Path]) -> dict[str, torch.Tensor]:
    """Read weights, running no code."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if names.SHARD.fullmatch(files[0].name):
        return _merged_shards(files[0].parent)
    found: dict[str, Any] = {}
    for file in files:
        if file.suffix == ".json":
            continue
        try:
            content: dict[str, Any] = load_file(file) if file.suffix == ".safetensors" else _unpickled(file)
        except SafetensorError as error:
            raise CheckpointDamaged(f"{file} is damaged: {error}", path=file) from error
        weights = next((content[key] for key in _WEIGHT_KEYS if isinstance(content.get(key), dict)), content)
        found.update({name: value for name, value in weights.items() if isinstance(value, torch.Tensor)})
    return {name: found[key] for name, key in keys.canonical(found).items()}


def _merged_shards(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return the weights that ZeRO sharded, in single precision, merged by DeepSpeed without running code of them."""
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed prints each shard
        try:
            from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

            from resume_adapters.integrations.deepspeed_engine.files import as_data
        except ImportError as error:
            raise MissingFramework(
                f"the weights of {checkpoint.name} are in shards that only DeepSpeed can merge: "
                "pip install 'deepspeed>=0.19.8,<0.20'"
            ) from error
        try:
            with as_data():
                weights: dict[str, torch.Tensor] = get_fp32_state_dict_from_zero_checkpoint(
                    str(checkpoint.parent), tag=checkpoint.name
                )
        except pickle.UnpicklingError as error:
            raise UnsupportedSetting(
                f"{checkpoint.name} cannot be read without running code from it: {error}", path=checkpoint
            ) from error
    return weights


def _unpickled(file: Path) -> dict[str, Any]:
    import torch

    refusal = f"{file.name} cannot be read without running code from it"
    try:
        with safe_load.allowing(safe_load.data_classes()), standing_in():
            content: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError) as error:
        raise UnsupportedSetting(f"{refusal}: {error}") from error
    if not isinstance(content, dict):
        raise UnsupportedSetting(f"{refusal}: it holds a {type(content).__name__}, expected a dict of weights")
    weights = [key for key in _WEIGHT_KEYS if isinstance(content.get(key), dict)] or list(content)
    odd = stand_ins(content, lambda key: key in weights)
    if odd:
        raise UnsupportedSetting(f"{refusal}: it holds {', '.join(sorted(odd))}")
    return content


def _write(weights: dict[str, torch.Tensor], output: Path, row: CheckpointInfo) -> tuple[int, int]:
    """Write a temporary file and rename it, so that the output is either complete or absent."""
    from safetensors.torch import save_file

    temporary = output.with_name(f".{output.name}.tmp")
    # Tied weights share their memory, which the format cannot express: each name gets its own.
    plain = {name: tensor.detach().clone().contiguous() for name, tensor in weights.items()}
    save_file(plain, temporary, metadata={"format": "pt", "checkpoint": row.path.name, "step": str(row.step)})
    os.replace(temporary, output)
    return len(plain), output.stat().st_size
