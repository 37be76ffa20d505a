"""``diff``: what two checkpoints do not have alike, by the names, dtypes, shapes and digests of tensors, and by values.

Only what a resume restores counts: no settings, no paths, no times, and nothing of when or by whom it was saved. Files
are read as data, a tensor at a time; no code of a checkpoint is run.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from resume_adapters.cli import run_directory
from resume_adapters.cli.app import EXIT_CODES, LOOK, Document, Json, app, show
from resume_adapters.cli.render import escape
from resume_adapters.cli.run_directory import STORAGE, ForeignNames
from resume_adapters.core.checkpoint import layout
from resume_adapters.core.checkpoint.catalog import FILE_SUFFIX
from resume_adapters.core.checkpoint.layout import (
    CONTROL,
    SIDECAR_SUFFIX,
    CheckpointState,
    has_sidecar,
    is_committed,
    state_of,
)
from resume_adapters.core.checkpoint.validity import check_sizes, read_manifest
from resume_adapters.core.state import encoding, safe_load
from resume_adapters.core.state.stand_ins import Opaque, standing_in
from resume_adapters.errors import NoValidCheckpoint, RunDirectoryUnusable, UnsupportedSetting

_TORCH_FILES = (".pt", ".pth", ".bin", ".pkl", ".ckpt")
_STATE_FILES = (".safetensors", ".distcp", *_TORCH_FILES)
"""How the names of files end that have weights or an optimizer."""

_SETTINGS = re.compile(
    r"training_args\.bin|(.*_)?config\.json|.*\.index\.json|.*token.*|vocab.*|merges\.txt|README\.md|chat_template.*"
    r"|resume/trackers\..*"
)
"""Files of what a launch was given, and the runs of trackers."""

_SETTINGS_WITHIN = frozenset(
    {"hyper_parameters", "datamodule_hyper_parameters", "pytorch-lightning_version", "ds_config", "ds_version"}
)
_TIMES = re.compile(r"(.*_)?(seconds|elapsed|runtime|per_second)")
"""Keys of what a clock measured."""

_PROOFS = frozenset({"check", "word_hash"})
"""What a loader's position has to recognise changed data by: where a launch began decides it, and no batch follows."""

_PROOF_TENSOR = re.compile(r"(.*\.)?position\.check\..*")
_NUMBER = re.compile(r"\d+\.")
_NUMBER_IN_REFERENCE = re.compile(r"(?<=Reference\(key=')\d+\.")
"""Before the names of the package's tensors: how many the file has before them, proofs too."""

_SHARD = re.compile(r"-\d+-of-\d+(?=\.)")
_LONGEST = 100
_SHOWN = 20
"""Differences that are printed; the JSON document has all."""

_UNREADABLE = (
    OSError, RuntimeError, ValueError, KeyError, EOFError, TypeError, IndexError, AssertionError,
    pickle.UnpicklingError, zipfile.BadZipFile, msgspec.MsgspecError,
)  # fmt: skip
"""What the readers raise for a file that is torn, or of another format."""

_HELP = "A checkpoint, or a run directory: its newest valid checkpoint."


@app.command(rich_help_panel=LOOK, epilog=f"{EXIT_CODES} For diff, 1 also means that the states differ.")
def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help=_HELP)],
    b: Annotated[Path, typer.Argument(metavar="B", help=f"{_HELP} Or the name or step of one beside A.")],
    json: Json = False,
) -> None:
    """Compare what a resume would restore from two checkpoints: tensors by dtype, shape and digest, values as they are.

    When, where and with which settings a checkpoint was saved does not count. No code of a checkpoint is run.
    """
    (path, one), (other_path, other) = _choose(a, a), _choose(b, a)
    of_a, of_b = _values(path), _values(other_path)
    found = [
        {"name": name, "a": of_a.get(name, ""), "b": of_b.get(name, "")}
        for name in dict.fromkeys([*of_a, *of_b])
        if of_a.get(name) != of_b.get(name)
    ]
    show({"a": one, "b": other, "equal": not found, "differences": found}, json, _in_words)
    raise typer.Exit(1 if found else 0)


def _in_words(document: Document) -> Iterator[str]:
    for label in ("a", "b"):
        side = document[label]
        step = "" if side["step"] is None else f" (step {side['step']})"
        newest = ", the newest valid checkpoint" if side["newest"] else ""
        yield escape(f"{label.upper()}: {side['checkpoint']}{step} of {side['run_directory']}{newest}")
    for each in document["differences"][:_SHOWN]:
        absent = [label.upper() for label in ("a", "b") if not each[label]]
        text = f"is missing in {absent[0]}" if absent else f"is {each['a']} in A, {each['b']} in B"
        yield escape(f"{each['name'].lstrip(': ')} {text}")
    if (more := len(document["differences"]) - _SHOWN) > 0:
        yield f"{more} more differ; --json lists all"
    yield "The states are equal." if document["equal"] else "The states differ."


def _choose(path: Path, first: Path) -> tuple[Path, Document]:
    """Return the checkpoint that an argument means, and its description; it may be beside the first argument's."""
    if not os.path.lexists(path) and len(path.parts) == 1:
        first = Path(os.path.realpath(first))
        directory = first.parent if _is_checkpoint(first) else first
        if os.path.lexists(directory / path):
            path = directory / path
        else:
            with contextlib.suppress(RunDirectoryUnusable, UnsupportedSetting):
                path = run_directory.read(directory).checkpoint(path.name).path
    path = Path(os.path.realpath(path)) if path.exists() else path
    is_newest = not _is_checkpoint(path)
    if is_newest:
        if path.is_file():
            raise RunDirectoryUnusable(f"{path} is not a checkpoint; expected one, or a run directory", path=path)
        run = run_directory.read(path)
        if run.anchor is None:
            raise NoValidCheckpoint(f"{run.path} has no valid checkpoint to compare", path=run.path)
        path, step = Path(os.path.realpath(run.anchor.path)), run.anchor.step
    elif is_committed(STORAGE, path):
        manifest = read_manifest(STORAGE, path)
        # A file that is missing is a difference; one that has grown, without end perhaps, is read by nobody.
        locate = layout.locator(STORAGE, path)
        there = tuple(entry for entry in manifest.files if STORAGE.exists(locate(entry.path)))
        check_sizes(STORAGE, path, msgspec.structs.replace(manifest, files=there))
        step = manifest.step
    else:
        step = getattr(ForeignNames().step(path), "step", None)
    return path, {"run_directory": str(path.parent), "checkpoint": path.name, "step": step, "newest": is_newest}


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
    return not is_run_directory and any(each.name.endswith(_STATE_FILES) for each in entries)


def _values(checkpoint: Path) -> dict[str, str]:
    """Return every value that a resume restores, as text, by its file and its place there.

    The shards of a model are one file. A file that cannot be read value by value is one value: its digest.
    """
    found: dict[str, str] = {}
    for path, file in sorted(layout.files(STORAGE, checkpoint)):
        name = path.as_posix()
        if _SETTINGS.fullmatch(name):
            continue
        where = "" if name == checkpoint.name else _SHARD.sub("", name)
        try:
            read = dict(_texts(_tree(file), where, checkpoint.parent))
        except _UNREADABLE:
            read = {where: f"a file, digest {STORAGE.digest(file)[1]}"}
        found |= read
    return found


def _tree(file: Path) -> Any:
    """Return what a file holds; a file of the package has references in the place of tensors.

    Raises:
        ValueError: its format is not one that is read value by value; or the reader's own, see ``_UNREADABLE``.
    """
    if file.suffix == ".json":
        return encoding.outline(STORAGE.read(file))
    if file.suffix == ".safetensors":
        from safetensors import SafetensorError, safe_open

        try:
            handle: Any = safe_open(file, "pt")
        except SafetensorError as error:
            raise ValueError(f"{file.name} is not one of safetensors") from error
        with handle:
            # One tensor is in memory at a time.
            found: dict[str, str] = {}
            is_own = f".{file.parent.name}".endswith(SIDECAR_SUFFIX)
            for key in handle.keys():  # noqa: SIM118  # no mapping
                name = key[number.end() :] if is_own and (number := _NUMBER.match(key)) else key
                if not (is_own and _PROOF_TENSOR.fullmatch(name)):
                    found[key if name in found else name] = _of_tensor(handle.get_tensor(key))
            return found
    if file.suffix not in _TORCH_FILES:
        raise ValueError(f"{file.name} is of another format")
    import torch

    with safe_load.data_only(safe_load.numpy_classes()), standing_in():
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)


def _texts(value: Any, where: str, directory: Path) -> Iterator[tuple[str, str]]:
    """Yield what a tree contains as text, each after its place; a list of plain values is one value."""
    children = _children(value)
    if not children:
        yield where, _text(value, directory)
    proofs = _PROOFS if children.keys() >= _PROOFS else ()
    for key, child in children.items():
        if key not in proofs and key not in _SETTINGS_WITHIN and not _TIMES.fullmatch(str(key)):
            place = _relative(str(key), directory)
            yield from _texts(child, f"{where}.{place}" if ": " in where else f"{where}: {place}", directory)


def _children(value: Any) -> Mapping[Any, Any]:
    """Return what a value contains, by key; empty for one that contains nothing."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, Opaque):
        state = value.state if isinstance(value.state, Mapping) else {"state": value.state}
        return {**dict(enumerate([*value.arguments, *value.items])), **value.entries, **state}
    is_nested = isinstance(value, list | tuple) and any(_is_tensor(each) or _children(each) for each in value)
    return dict(enumerate(value)) if is_nested else {}


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "shape")


def _text(value: Any, directory: Path) -> str:
    if _is_tensor(value):
        return _of_tensor(value)
    text = _relative(value, directory) if isinstance(value, str) else _NUMBER_IN_REFERENCE.sub("", repr(value))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..., digest {encoding.digest_of(text)}"


def _of_tensor(tensor: Any) -> str:
    """Return dtype, shape and digest of a tensor or an array.

    Raises:
        ValueError: it has no digest.
    """
    digest = encoding.digest_of(tensor.to_dense() if getattr(tensor, "is_sparse", False) else tensor)
    if digest is None:
        raise ValueError(f"a tensor of {tensor.dtype} has no digest")
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}, digest {digest}"


def _relative(text: str, directory: Path) -> str:
    """Remove the run directory from the beginning of a text that is a path: another one may hold the same run."""
    for begin in range(len(directory.parts) if "/" in text else 0):
        prefix = str(Path(*directory.parts[begin:]))
        if f"{text}/".startswith(f"{prefix}/"):
            return text.removeprefix(prefix)
    return text
