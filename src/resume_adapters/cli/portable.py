"""Weights on their way from a checkpoint to portable files of safetensors, one tensor in memory at a time."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from resume_adapters.core.checkpoint import distributed_metadata
from resume_adapters.core.checkpoint.files import CheckpointFiles
from resume_adapters.core.state import keys, safe_load
from resume_adapters.core.state.comparison import bits
from resume_adapters.core.state.safetensors_file import safetensors_header
from resume_adapters.core.state.stand_ins import stand_ins, standing_in
from resume_adapters.errors import CheckpointDamaged, MissingFramework, UnsupportedSetting

if TYPE_CHECKING:
    import torch

_KEYS = ("state_dict", "module")
"""The key of the weights where a file holds more: Lightning's, and DeepSpeed's."""

_WEIGHT_KEYS = (*_KEYS, "model")
"""The same, or that of Accelerate's shards."""


class Weight(NamedTuple):
    """A tensor that is still in its file.

    Attributes:
        form: has its dtype and shape; its content may be absent.
        read: returns the tensor.
    """

    form: torch.Tensor
    read: Callable[[], torch.Tensor]


def of_files(files: Iterable[Path]) -> dict[str, Weight]:
    """Return the weights in files of safetensors or torch, which are mapped; no code of them is run.

    Raises:
        CheckpointDamaged: a file cannot be read.
        UnsupportedSetting: it cannot be read without running code from it.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    found: dict[str, Any] = {}
    for file in files:
        try:
            content: dict[str, Any] = load_file(file) if file.suffix == ".safetensors" else _unpickled(file)
        except SafetensorError as error:
            raise CheckpointDamaged(f"{file} is damaged: {error}", path=file) from error
        found.update(next((content[key] for key in _KEYS if isinstance(content.get(key), dict)), _by_model(content)))
    return {name: Weight(each, each.detach) for name, each in found.items() if isinstance(each, torch.Tensor)}


def _by_model(content: dict[str, Any]) -> dict[str, Any]:
    """Return the weights in a file that has each model under the name that a script gives it, or weights alone."""
    import torch

    nested = {key: each for key, each in content.items() if isinstance(each, dict)}
    models = {key: each for key, each in nested.items() if any(isinstance(one, torch.Tensor) for one in each.values())}
    if len(models) < 2:
        return next(iter(models.values()), content)
    return {f"{model}.{name}": each for model, held in models.items() for name, each in held.items()}


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


@contextlib.contextmanager
def of_shards(files: CheckpointFiles) -> Iterator[dict[str, Weight]]:
    """Return the weights of the first model in shards of ``torch.distributed.checkpoint``, within this context.

    No process group is needed, and no code of the files is run.

    Raises:
        CheckpointDamaged: an index or a shard cannot be read.
        UnsupportedSetting: no index names weights of a model.
    """
    with distributed_metadata.reading(files) as indexes:
        for name, index in indexes.items():
            if found := _of_index(files.require(name).parent, index):
                yield found
                return
    raise UnsupportedSetting(
        f"{files.checkpoint.name} has shards, but none of a model: expected them below one of "
        f"{', '.join(_WEIGHT_KEYS)}, as Accelerate, the Trainer and Lightning save them"
    )


def _of_index(directory: Path, index: Any) -> dict[str, Weight]:
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    class Reader(FileSystemReader):
        def read_metadata(self, *_: Any, **__: Any) -> Any:
            return index  # which is not read again for each tensor

    def read(key: str, form: torch.Tensor) -> torch.Tensor:
        tensor = torch.empty_like(form, device="cpu")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns that there is no process group
            load({key: tensor}, storage_reader=Reader(directory), no_dist=True)
        return tensor

    found: dict[str, Weight] = {}
    for key, stored in index.state_dict_metadata.items():
        path = (index.planner_data or {}).get(key, ())
        if isinstance(stored, TensorStorageMetadata) and len(path) > 1 and path[0] in _WEIGHT_KEYS:
            form = torch.empty(stored.size, dtype=stored.properties.dtype, device="meta")
            name = ".".join(map(str, path[1:]))
            found[name] = Weight(form, functools.partial(read, key, form))
    return found


def of_zero(checkpoint: Path) -> dict[str, Weight]:
    """Return the weights that ZeRO sharded, in single precision, merged by DeepSpeed without running code of them.

    Raises:
        MissingFramework: DeepSpeed is not installed.
        UnsupportedSetting: a file cannot be read without running code from it.
    """
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
                found: dict[str, Any] = get_fp32_state_dict_from_zero_checkpoint(
                    str(checkpoint.parent), tag=checkpoint.name, lazy_mode=True
                )
        except pickle.UnpicklingError as error:
            raise UnsupportedSetting(
                f"{checkpoint.name} cannot be read without running code from it: {error}", path=checkpoint
            ) from error
    # Of stage 3 it returns objects that merge one tensor when they are asked.
    return {name: Weight(each, each.contiguous) for name, each in found.items()}


def write(weights: Mapping[str, Weight], output: Path, facts: Mapping[str, str], limit: int | None) -> int:
    """Write weights by their names without wrappers; the output is complete or absent.

    Args:
        weights: in the order in which they are saved.
        output: the file; with a limit, the directory.
        facts: what the files say of themselves.
        limit: bytes of tensors in one file, unless one tensor is larger; ``None``: all.

    Returns:
        The bytes that were written.
    """
    named = {name: weights[key] for name, key in keys.canonical(weights).items()}
    temporary = output.with_name(f".{output.name}.tmp")
    if limit is None:
        _write_file(named, temporary, facts)
        os.replace(temporary, output)
        return output.stat().st_size
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    _write_shards(_split(named, limit), temporary, facts)
    os.rename(temporary, output)
    return sum(file.stat().st_size for file in output.iterdir())


def _size(weight: Weight) -> int:
    return weight.form.shape.numel() * weight.form.dtype.itemsize


def _split(weights: Mapping[str, Weight], limit: int) -> list[dict[str, Weight]]:
    """Fill one shard after the other."""
    shards: list[dict[str, Weight]] = [{}]
    room = limit
    for name, weight in weights.items():
        if shards[-1] and _size(weight) > room:
            shards.append({})
            room = limit
        shards[-1][name] = weight
        room -= _size(weight)
    return shards


def _write_shards(shards: list[dict[str, Weight]], directory: Path, facts: Mapping[str, str]) -> None:
    """Write shards and their index, by the names that ``from_pretrained`` of transformers reads."""
    if len(shards) == 1:
        _write_file(shards[0], directory / "model.safetensors", facts)
        return
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        _write_file(shard, directory / name, facts)
    index = {
        "metadata": {"total_size": sum(_size(weight) for shard in shards for weight in shard.values())},
        "weight_map": {key: name for name, shard in zip(names, shards, strict=True) for key in shard},
    }
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _write_file(weights: Mapping[str, Weight], path: Path, facts: Mapping[str, str]) -> None:
    """Write a file of safetensors; tied weights, which the format cannot express, are written under each name."""
    header, order = safetensors_header({name: weight.form for name, weight in weights.items()}, facts)
    with path.open("wb") as file:
        file.write(header)
        for name in order:
            file.write(bits(weights[name].read()).numpy().data)
