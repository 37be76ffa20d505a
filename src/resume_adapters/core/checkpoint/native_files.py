"""Read and check the weight files of a framework. The libraries of their formats open them by path."""

from __future__ import annotations

import contextlib
import json
import pickle
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resume_adapters.core.checkpoint.files import CheckpointFiles
from resume_adapters.core.checkpoint.manifest import require_inside
from resume_adapters.core.state import safe_load
from resume_adapters.core.state.stand_ins import load, stand_ins, standing_in
from resume_adapters.errors import CheckpointDamaged, NotSerialisable

if TYPE_CHECKING:
    import torch


def weight_shards(files: CheckpointFiles, index: str) -> list[Path]:
    """Return the files that an index of sharded weights names.

    Args:
        files: those of the checkpoint.
        index: the path of the index in the checkpoint.

    Raises:
        CheckpointDamaged: it is not an index, or names a file that is not in the checkpoint.
    """
    try:
        shards = sorted({str(shard) for shard in json.loads(files.read(index))["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointDamaged(f"{index} is not an index of weights: {error}", path=files.checkpoint) from error
    for shard in shards:
        require_inside(shard, index)
        if files.find(shard) is None:
            raise CheckpointDamaged(
                f"{index} names {shard}, which is not in {files.checkpoint.name}", path=files.checkpoint
            )
    return [files.require(shard) for shard in shards]


def read_weight_files(files: Iterable[Path]) -> dict[str, torch.Tensor]:
    """Read weight files: safetensors, or torch's own format with ``weights_only=True``."""
    weights: dict[str, Any] = {}
    for file in files:
        weights.update(read_native(file))
    return weights


def read_native(file: Path) -> dict[str, Any]:
    """Read a dict from a file: safetensors, or torch's own format with ``weights_only=True`` and classes of data.

    Raises:
        CheckpointDamaged: it cannot be read, or not without running code from it.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        with safe_load.allowing(safe_load.data_classes()):
            found = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except (SafetensorError, *UNREADABLE) as error:
        raise CheckpointDamaged(f"{file.name} cannot be read: {error}", path=file) from error
    if not isinstance(found, dict):
        raise CheckpointDamaged(f"{file.name} holds a {type(found).__name__}, expected a dict", path=file)
    return found


def copy_keys(file: Path, target: Path, is_kept: Callable[[str], bool]) -> None:
    """Write what a file of ``torch.save`` has under some of its keys to another file. It may run on any thread.

    Raises:
        CheckpointDamaged: it cannot be read.
        NotSerialisable: an object there could only be written after its code had run.
    """
    import torch

    try:
        kept = {key: value for key, value in load(file).items() if is_kept(key)}
    except UNREADABLE as error:
        raise CheckpointDamaged(f"{file.name} cannot be read: {error}", path=file) from error
    if odd := stand_ins(kept, lambda place: True):
        raise NotSerialisable(f"{file.name} holds {', '.join(sorted(odd))}{_where(odd)}, which is not data", path=file)
    torch.save(kept, target)


def require_loadable(files: Iterable[Path], is_read: Callable[[str], bool]) -> None:
    """Refuse files that could not be loaded again without running code.

    Args:
        files: what a resume would load.
        is_read: returns whether a resume reads what is at a place; elsewhere objects of any class may be.

    Raises:
        NotSerialisable: naming what is in one of them, and where.
    """
    for file in files:
        if zipfile.is_zipfile(file):  # torch.save's older format does not list what it holds
            _require_data(file, is_read)


def _require_data(file: Path, is_read: Callable[[str], bool]) -> None:
    content, problem = _as_a_resume_reads(file)
    is_dict = isinstance(content, dict)
    odd = stand_ins(content, is_read) if is_dict else dict.fromkeys(safe_load.unknown_classes(file), "")
    if odd and safe_load.added_classes().issuperset(odd):
        problem = f"torch fills no {', '.join(sorted(odd))}{_where(odd)}"
    elif odd:
        raise NotSerialisable(
            f"{file.name} holds {', '.join(sorted(odd))}{_where(odd)}, which would have to run code to be loaded "
            "again, so nothing could be resumed from it: keep such objects out of what the model, the optimizer, the "
            "scheduler and the callbacks save. If you trust these classes, call torch.serialization.add_safe_globals() "
            "with them before the training begins",
            path=file,
        )
    if problem:
        raise NotSerialisable(
            f"{file.name} cannot be loaded again, so nothing could be resumed from it, though torch was told of its "
            f"classes by add_safe_globals(): {problem}. Let what has an object of that class save a plain dict or list",
            path=file,
        )


def _as_a_resume_reads(file: Path) -> tuple[Any, str]:
    """Return what a file holds, with stand-ins for what torch does not load, or why it cannot be read."""
    import torch

    try:
        with safe_load.data_only(safe_load.data_classes()), standing_in():
            return torch.load(file, map_location="cpu", weights_only=True, mmap=True), ""
    except UNREADABLE as error:
        reason = str(error).rpartition("WeightsUnpickler error: ")[2]  # torch puts advice around it
        return None, reason.strip().partition("\n")[0] or type(error).__name__


def _where(odd: Mapping[str, str]) -> str:
    places = sorted({place for place in odd.values() if place})
    return f" (at {', '.join(places[:3])}{' and more' if places[3:] else ''})" if places else ""


UNREADABLE = (
    *(pickle.UnpicklingError, zipfile.BadZipFile, OSError, RuntimeError, EOFError, ValueError, KeyError, IndexError),
    *(TypeError, AttributeError, OverflowError, MemoryError, AssertionError, RecursionError),
)
"""What ``torch.load`` raises where a file is not what ``torch.save`` wrote, or names code."""


def require_plain(file: Path) -> None:
    """Refuse an archive of torch that becomes larger where it is read: torch compresses nothing, and shares nothing.

    Raises:
        CheckpointDamaged: it would.
    """
    content, room = list[zipfile.ZipInfo](), 0
    with contextlib.suppress(*UNREADABLE):  # its reader says what is wrong
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                content, room = archive.filelist, archive.start_dir
    is_of_torch = any(each.filename.endswith("/data.pkl") for each in content)
    if is_of_torch and (size := sum(each.file_size for each in content)) > room:
        raise CheckpointDamaged(f"{file.name} would be read as {size:,} bytes, more than it has", path=file)


def require_intact(file: Path) -> None:
    """Check that a file in the format of torch or of safetensors is complete, not that it is the right one.

    Raises:
        CheckpointDamaged: the file is truncated or changed.
    """
    from safetensors import SafetensorError, safe_open

    require_plain(file)
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt"):
                return
        with zipfile.ZipFile(file) as archive:
            # Torch can leave checksums out, and a copied save does for tensors.
            archive.filelist[:] = [each for each in archive.filelist if each.CRC]
            torn = archive.testzip()
    except (SafetensorError, zipfile.BadZipFile, OSError, RuntimeError, ValueError, EOFError, zlib.error) as error:
        raise CheckpointDamaged(f"{file.name} is torn: {error}", path=file) from error
    if torn is not None:
        raise CheckpointDamaged(f"{file.name} is torn at {torn}", path=file)
