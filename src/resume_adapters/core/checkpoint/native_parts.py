"""Which part of the state each value of a checkpoint belongs to, by its file and its place in the file.

Pure: the names of the files of Transformers, Lightning, Accelerate, DeepSpeed and of this package, and of their keys.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

Path = tuple[Any, ...]
"""The keys that lead to a value in a file."""

UNCOUNTED = frozenset({"circumstances", "settings", "trackers"})
"""Parts that are not state: when, where and with which settings a checkpoint was saved."""

_ORDER = ("manifest", "model", "optimizer", "scheduler", "scaler", "rng", "data", "counters", "metrics", "callbacks")

PAYLOAD = "*.ckpt"
"""Stands for the path of a checkpoint that is a single file, whatever its name."""


class Item(NamedTuple):
    """What one value of a checkpoint is.

    Attributes:
        part: the part of the state.
        where: the file, without what depends on its format and on how many files a model has; empty where a checkpoint
            is one file.
        name: the value's name in that file.
        generator: the random generator that it belongs to; empty outside the part ``rng``.
    """

    part: str
    where: str
    name: str
    generator: str = ""


_SETTINGS = (
    r"training_args\.bin|(.*_)?config\.json|.*\.index\.json|.*token.*|vocab.*|merges\.txt|README\.md|chat_template.*"
)

_FILES: tuple[tuple[str, str], ...] = (
    (_SETTINGS, "settings"),
    (r"optimizer.*", "optimizer"),
    (r"scheduler.*", "scheduler"),
    (r"rng_state.*|random_states_.*", "rng"),
    (r"scaler.*", "scaler"),
    (r"(sampler|dl_state_dict).*", "data"),
    (r"custom_checkpoint_.*", "registered"),
    (r"(.*/)?[^/]*_optim_states\.pt", "optimizer"),
    (r"(.*/)?[^/]*_model_states\.pt|\*\.ckpt|trainer_state\.json", "counters"),
    (r"resume/rank-\d+", "counters"),
    (r"(model|pytorch_model|adapter_model).*|.*\.(safetensors|bin)", "model"),
)
"""The part of a framework's file, by its path; the first pattern counts."""

_KEYS: Mapping[str, str] = {
    # Lightning
    "state_dict": "model",
    "optimizer_states": "optimizer",
    "lr_schedulers": "scheduler",
    "callbacks": "callbacks",
    "MixedPrecision": "scaler",
    "hyper_parameters": "settings",
    "datamodule_hyper_parameters": "settings",
    "pytorch-lightning_version": "settings",
    # DeepSpeed
    "module": "model",
    "buffer_names": "model",
    "param_shapes": "model",
    "optimizer": "optimizer",
    "lr_scheduler": "scheduler",
    "data_sampler": "data",
    "ds_config": "settings",
    "ds_version": "settings",
    # Transformers
    "log_history": "metrics",
    "best_metric": "metrics",
    "best_global_step": "metrics",
    "best_model_checkpoint": "metrics",
    # A rank's own state
    "rng": "rng",
    "position": "data",
    "loaders": "data",
    "epoch": "data",
    "begun": "data",
    "consumed": "data",
    "together": "data",
    "samples": "data",
    "metrics": "metrics",
    "checkpoints": "callbacks",
}
"""The part of a key of a file that holds more than one part; other keys count something."""

_MANIFEST = {
    "metrics": "metrics",
    "cursor": "data",
    "written": "circumstances",
    "generation": "circumstances",
    "reason": "circumstances",
}
"""The part of a field of the manifest; the other fields are facts of the checkpoint."""

_CLOCKS = ("seconds", "elapsed")
"""Names, in a rank's own state, of times that a clock measured."""

_GENERATORS = {
    "python": "python",
    "random_state": "python",
    "numpy": "numpy",
    "numpy_random_seed": "numpy",
    "torch": "torch",
    "torch_manual_seed": "torch",
    "cuda": "cuda",
    "torch_cuda_manual_seed": "cuda",
    "devices": "cuda",
}
"""The generator to which a key leads, in the files of every framework."""

_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".pkl", ".ckpt", ".distcp")

_WEIGHT_KEYS = ("state_dict", "module")
_MODELS = re.compile(r"(pytorch_model|model|adapter_model)(-\d+-of-\d+)?")


def part_of_file(file: str) -> str:
    """Return the part to which a whole file belongs, by its path in the checkpoint."""
    if file.startswith("resume/") and not file.startswith("resume/rank-"):
        return file.removeprefix("resume/").split(".")[0]
    return next((part for pattern, part in _FILES if re.fullmatch(f"(?:{pattern})(?:\\..*)?", file)), "files")


def parts_of_file(file: str) -> tuple[str, ...]:
    """Return every part of which a file may hold something; the one that it is counted to comes first."""
    if file == PAYLOAD:
        return "model", "optimizer", "scheduler", "counters", "callbacks"
    if file.endswith("_model_states.pt"):
        return "model", "scheduler", "counters"
    if file.startswith("resume/rank-"):
        return "counters", "rng", "data", "metrics"
    return (part_of_file(file),)


def holds_state(file: str) -> bool:
    """Return whether a file has a name and a format in which a framework saves weights or an optimizer."""
    return file.endswith(_SUFFIXES) and part_of_file(file) in ("model", "optimizer", "counters")


def order(part: str) -> tuple[bool, int, str]:
    """Return the key that sorts parts: those that every checkpoint has, others, and last what is not state."""
    return part in UNCOUNTED, _ORDER.index(part) if part in _ORDER else len(_ORDER), part


def companion(file: str) -> str:
    """Return the other file of a part of this package: tensors and the JSON that names them; empty for other files."""
    stem, dot, suffix = file.rpartition(".")
    other = {"json": "safetensors", "safetensors": "json"}.get(suffix)
    return f"{stem}{dot}{other}" if other and file.startswith("resume/") else ""


def item(file: str, path: Path) -> Item:
    """Return what a value is.

    Args:
        file: path of the file in the checkpoint.
        path: the keys that lead to the value in the file.
    """
    if file == "resume/manifest.json":
        return Item(_MANIFEST.get(path[0], "manifest"), "manifest", _dotted(path))
    part = part_of_file(file)
    if part == "counters" and path:
        part = _KEYS.get(str(path[0]), part)
        if path[-1] in _CLOCKS and file.startswith("resume/"):
            part = "circumstances"
    if "position" in path and path[path.index("position") + 1 :][:1] == ("step",):
        part = "rng"
    if part == "model" and path[:1] and path[0] in _WEIGHT_KEYS:
        path = path[1:]
    return Item(part, _where(file, part), _dotted(path), _generator(path) if part == "rng" else "")


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))


def _where(file: str, part: str) -> str:
    if file == PAYLOAD:
        return ""
    stem = re.sub(r"\.(safetensors|json|pt|pth|bin|pkl)$", "", file)
    return "model" if part == "model" and _MODELS.fullmatch(stem) else stem


def _generator(path: Path) -> str:
    """Return the generator that a value of random state belongs to; empty if it belongs to none."""
    keys = list(map(str, path))
    if "registered" in keys[:-1]:
        return f"registered {keys[keys.index('registered') + 1]}"
    for index, key in enumerate(keys):
        if key in _GENERATORS:
            name = _GENERATORS[key]
            return f"cuda {keys[index + 1]}" if name == "cuda" and keys[index + 1 :] else name
    return "torch" if "cpu" in keys else ""
