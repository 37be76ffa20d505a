"""Valid encodings of absurd values, by the kind of document: what somebody may have forged in a run directory.

A kind says how its documents are read and written, and what may stand at which place in them. In a place, ``*`` is any
child and ``**`` any node; a function gets what is there, and returns what takes its place.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import math
import os
import pickle
import random
import re
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
import xxhash

VICTIMS = "<victims>"
"""Stands for a directory that is no business of the run."""

_RAW = {
    "<deep>": "[" * 50_000 + "]" * 50_000,
    "<huge>": "1e999",
    "<long>": f'"{"x" * (1 << 20)}"',
    "<digits>": "9" * 5_000,
}
"""What Python's encoder does not write, by the text that stands for it."""

WRONG = [None, True, -1, 0, 1 << 70, 1.5, "", "x", [], {}, [[]], *_RAW]

COUNTS = [
    *(-1, 0, 1, 1 << 31, (1 << 53) + 1, 10**12, 10**12 + 1, 1 << 62, (1 << 62) + 1, (1 << 63) - 1, 1 << 63, 1 << 64),
    *(1.0, 1e308, True, "1"),
]

TIMES = [-1, 0, -0.0, 5e-324, 1e308, math.nan, math.inf, 253_402_300_799, 253_402_300_800, 1 << 64, "<huge>"]

TEXTS = ["", "x", "\0", "\n\x1b[31m", "%s{0}", "\ud800", "<long>", "0" * 32, VICTIMS]

PATHS = [
    *(".", "..", "", "/", "a/", "/a", "a//b", "./a", "a/..", "a/../b", "a\0b", "a\\b", "a\nb", "\ud800", "~", "-rf"),
    *("x" * 255, "x" * 256, "é" * 128, "x/" * 499 + "x", "x/" * 500 + "x"),
    *("resume", "resume/manifest.json", "resume/pending", "resume/resume/manifest.json", "manifest.json", "pipe"),
    *(".resume/journal.jsonl", "../.resume/generation", "../latest", "../victims/train.py", "../../victims/train.py"),
    *(f"{VICTIMS}/train.py", VICTIMS, "/etc/passwd", "/dev/zero", "memory://x", "file:///etc/passwd"),
]

NAMES = [
    *PATHS,
    *("train.py", ".resume", "latest", "x.ckpt", "x.ckpt.resume", "checkpoint-15", "checkpoint_15", "global_step15"),
    *("last.ckpt", "checkpoint-" + "9" * 239, "checkpoint-٣", "notes", "checkpoint-15.superseded"),
]

Pools = Mapping[str, Sequence[Any]]


class Kind(NamedTuple):
    """A kind of document.

    Attributes:
        is_of: returns whether a file is one, by its path in the run directory.
        read: returns the tree that a document holds.
        write: returns the document of a tree.
        pools: what may stand at which place.
    """

    is_of: Callable[[Path], bool]
    read: Callable[[bytes], Any]
    write: Callable[[Any], bytes]
    pools: Pools


def named(pattern: str) -> Callable[[Path], bool]:
    """Return what recognises the files of a kind by their path."""
    return lambda path: re.search(pattern, path.as_posix()) is not None


# ---- Documents


def write_json(tree: Any) -> bytes:
    text = json.dumps(tree)
    for name, raw in _RAW.items():
        text = text.replace(f'"{name}"', raw)
    return text.encode()


def read_manifest(document: bytes) -> Any:
    return json.loads(document)["manifest"]


def write_manifest(record: Any) -> bytes:
    content = write_json(record)
    return b'{"digest":"%s","manifest":%s}' % (xxhash.xxh3_128_hexdigest(content).encode(), content)


def _read_lines(document: bytes) -> Any:
    return [json.loads(line) for line in document.splitlines()]


def _write_lines(tree: Any) -> bytes:
    lines = tree if isinstance(tree, list) else [tree]
    return b"".join(line if isinstance(line, bytes) else write_json(line) + b"\n" for line in lines)


def _read_header(document: bytes) -> Any:
    (length,) = struct.unpack_from("<Q", document)
    header = json.loads(document[8 : 8 + length])
    return {**header, "<data>": document[8 + length :].decode("latin-1")}


def _write_header(tree: Any) -> bytes:
    if not isinstance(tree, dict):
        return write_json(tree)
    data, length = tree.pop("<data>", ""), tree.pop("<length>", None)
    header = write_json(tree)
    size = len(header) if not isinstance(length, int) or length < 0 else length % (1 << 64)
    return struct.pack("<Q", size) + header + str(data).encode("latin-1", "replace")


def _read_torch(document: bytes) -> Any:
    from resume_adapters.core.state import safe_load

    with safe_load.allowing(safe_load.data_classes()):
        return torch.load(io.BytesIO(document), weights_only=True, map_location="cpu")


def _write_torch(tree: Any) -> bytes:
    if isinstance(tree, bytes):
        return tree
    file = io.BytesIO()
    torch.save(tree, file)
    return file.getvalue()


# ---- What may stand where


def _many(count: int) -> Callable[[random.Random, Any], Any]:
    """Return what names so many files."""
    return lambda _, old: [{"path": f"f{each}", "bytes": 0, "digest": ""} for each in range(count)]


def _twice(_: random.Random, old: Any) -> Any:
    return old * 2


def _again(_: random.Random, old: Any) -> Any:
    """Return entries that name one file again and again."""
    return [*old, *[old[-1]] * (1 << 17)]


def _both(_: random.Random, old: Any) -> Any:
    """Return entries of which one is a file and a directory."""
    return [*old, {**old[0], "path": f"{old[0]['path']}/within"}]


def _lines(line: bytes, count: int) -> Callable[[random.Random, Any], Any]:
    return lambda _, old: [*old, line * count]


def _then(*entries: Any) -> Callable[[random.Random, Any], Any]:
    """Return what adds entries to a list."""
    return lambda _, old: [*old, *entries]


def _commit_of_any(draw: random.Random, old: Any) -> Any:
    name, step = draw.choice(NAMES), draw.choice([*COUNTS, 15, 16])
    return [*old, {"time": 1.0, "event": "commit", "step": step, "checkpoint": name, "reason": "scheduled"}]


_MANIFEST: Pools = {
    "": WRONG,
    "format": [0, 2, *COUNTS],
    "step": COUNTS,
    "generation": COUNTS,
    "epoch": TIMES,
    "written": TIMES,
    "world_size": [0, 2, 1 << 20, (1 << 20) + 1, *COUNTS],
    "ranks": [[], [0], [7], [0, 0], [-1], [1 << 62], [0] * 100_000],
    "best": NAMES,
    "metrics": [{"x": math.nan}, {"": 1e308}, {"x": "y"}, {str(each): 0.0 for each in range(100_000)}],
    "cursor": [
        *({"epoch": []}, {"samples": "x"}, {"samples": 1e308, "of": -1}, {"micro_batches": None}, {"order": {}}),
        *({"samples": 1, "of": "x"}, {"samples": []}, {"epoch": "<long>"}, {"samples": 1 << 60, "of": {}}),
    ],
    "parts": [[{"name": "rng", "by": "core"}] * 10_000, [{"name": "<long>", "by": "x"}], [{}], [{"name": 1, "by": 2}]],
    "files": [[], _many(1 << 18), _many((1 << 18) + 1), _twice, _again, _both],
    "files/*": WRONG,
    "files/*/path": PATHS,
    "files/*/bytes": COUNTS,
    "files/*/digest": TEXTS,
    "files/*/rank": [1, 7, *COUNTS],
    "files/*/unknown": WRONG,
    "unknown": WRONG,
    **dict.fromkeys(("reason", "architecture", "package", "framework"), TEXTS),
}

_JOURNAL: Pools = {
    "": [
        *(
            _lines(b"{}\n", 200_000),
            _lines(b"\n", 1 << 20),
            _lines(b"x" * (1 << 20) + b"\n", 5),
            _lines(b"\0", 9 << 20),
        ),
        _lines(b'{"time":1,"event":"commit","step":1,"checkpoint":"a"}\n', 100_000),
        _then({"time": 1, "event": "rewind", "step": -1}),
        _then({"time": 1, "event": "start", "generation": 1 << 62, "step": 1 << 62, "set_aside": ["checkpoint-15"]}),
        *(_commit_of_any, _commit_of_any, _commit_of_any, _then({"time": 1, "event": "prune", "checkpoint": "notes"})),
    ],
    "*": WRONG,
    "*/time": TIMES,
    "*/event": ["commit", "prune", "start", "rewind", "stopped", "failed", "set-aside-on-tiers", *TEXTS],
    "*/step": COUNTS,
    "*/generation": COUNTS,
    "*/seconds": TIMES,
    "*/checkpoint": [*NAMES, *WRONG],
    "*/set_aside": [NAMES, [[]], [{}], "x", ["checkpoint-15", "checkpoint_15", "global_step15", "last.ckpt"]],
    "*/tiers": [["x"], [1], "x", [[]]],
    "*/reason": [*TEXTS, *WRONG],
    "*/rejected": [*TEXTS, *WRONG],
    "*/cursor": WRONG,
}

_GENERATION: Pools = {
    "": WRONG,
    "generation": [10**12 - 1, *COUNTS],
    "token": TEXTS,
    "host": TEXTS,
    "pid": COUNTS,
    "job": TEXTS,
    "started": TIMES,
    "unknown": WRONG,
}

_STATUS: Pools = {
    "": WRONG,
    "state": ["running", "stopped", "halted", "finished", "failed", "killed", "unknown", *TEXTS],
    **dict.fromkeys(("step", "horizon", "last_commit", "next_save", "generation", "pid", "unremovable"), COUNTS),
    **dict.fromkeys(("epoch", "rate", "eta", "ends", "updated"), TIMES),
    **dict.fromkeys(("reason", "host", "job", "staging"), TEXTS),
    "result": [*WRONG, {"x": "<deep>"}],
    "mirrors": [[{}], [{"tier": "<long>", "step": -1, "behind": 1 << 62}], [{"tier": 1}], [{"tier": "x"}] * 10_000],
    "unknown": WRONG,
}

_ENCODED = [
    *({"$": kind, "of": of} for kind in ("int", "float") for of in ("x", "9" * 5_000, "nan", [], None)),
    *({"$": "deque", "of": of} for of in ([-1, []], [1 << 70, []], [0, [1]], [1, 2, 3], [])),
    *({"$": kind, "of": [[[], 1]]} for kind in ("dict", "OrderedDict", "Counter", "set", "frozenset", "tuple")),
    *({"$": "defaultdict", "of": of} for of in (["list", []], ["os.system", []], [None, [[1, 2]]], [{}, []], [])),
    *({"$": "device", "of": of} for of in (["cuda:99", 1], ["meta", {"$": "tensor", "key": "x"}], [], [1, 2])),
    *({"$": kind, "of": 1} for kind in ("array", "scalar", "bytes", "complex", "dtype", "os.system", "", "none")),
    *({"$": "dtype", "of": of} for of in ("nn", "float99", "__builtins__", [], {})),
    *({"$": "tensor"}, {"$": "tensor", "key": []}, {"$": []}, {"$": None, "of": 1}, {"$": "int"}),
]

_TREE: Pools = {
    "": [*WRONG, *_ENCODED],
    "**": [*WRONG, *_ENCODED, *COUNTS, *PATHS],
    "shares": [{"x": 1 << 70}, {"x": "y"}, {"": -1}, {str(each): 0 for each in range(100_000)}],
    "buckets": [[["x"] * 100_000], [[]] * 100_000, [[1]], ["x"]],
    "observed": [[{}], [[]], ["x"], [{"path": VICTIMS}]],
    "settings": [{}, {"arguments": {"x": 1}}, {"optimizers": [{}]}, {"schedulers": [1]}, {"frozen": [1 << 70]}],
    "settings/arguments": [dict.fromkeys(map(str, range(100_000)), "x"), {"x": []}, {"keep": "<long>"}],
    "settings/arguments/*": TEXTS,
    "settings/optimizers/*/order": [[1 << 70], ["x"], [0] * 100_000],
    "settings/optimizers/*/sizes": [[-1], [1 << 70], ["x"]],
    "position/consumed": COUNTS,
    "position/start": COUNTS,
}

_HEADER: Pools = {
    "": WRONG,
    "*": WRONG,
    "*/dtype": ["F8_E4M3", "F4", "C64", "BOOL", "I64", "U16", "E8M0", "x", "", 1],
    "*/shape": [[], [-1], [0], [1 << 62, 4], [1 << 64], [1.5], [1] * 100_000, [1 << 32, 1 << 32, 0], "x"],
    "*/data_offsets": [[0, 0], [8, 0], [0, 1 << 62], [1 << 63, 1 << 64], [-1, 4], [0], [0, 4], [4, 8], [0, 1 << 40]],
    "*/unknown": WRONG,
    "__metadata__": [{}, {"a": "b"}, {"a": 1}, {"a": "<long>"}, None],
    "../victims": [{"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}],
    "<length>": [0, 1, 1 << 62, 1 << 63, (1 << 64) - 1, 100_000_001],
    "<data>": ["", "x" * 7],
}

_TRAINER: Pools = {
    "": WRONG,
    **dict.fromkeys(("global_step", "max_steps", "num_train_epochs", "train_batch_size", "save_steps"), COUNTS),
    **dict.fromkeys(("epoch", "best_metric", "total_flos", "num_input_tokens_seen"), TIMES),
    "best_model_checkpoint": NAMES,
    "log_history": [[{}] * 100_000, [[]], [{"step": "x"}], {}],
    "stateful_callbacks": [{"x": {}}, {"TrainerControl": {"args": {"x": 1}}}, {"os.system": [{"args": 1}]}, []],
    "weight_map": [{"x": path} for path in PATHS],
    "unknown": WRONG,
    "**": WRONG,
}


@functools.cache
def _bomb() -> bytes:
    """Return an archive whose content takes 700 MB, in less than one."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        with archive.open("x/data.pkl", "w") as entry:
            for _ in range(700):
                entry.write(b"\0" * (1 << 20))
        archive.writestr("x/version", "3")
    return file.getvalue()


def _deep(_: random.Random, old: Any) -> Any:
    return functools.reduce(lambda inner, _: [inner], range(900), old)


def _scored(draw: random.Random, old: Any) -> Any:
    return {path: torch.tensor(1.0) for path in draw.sample(NAMES, 5)}


_NATIVE: list[Any] = [
    *(None, True, -1, 1 << 70, 1e308, math.nan, "x", b"x", [], {}, (), OrderedDict(), _deep, torch.Size([1 << 60])),
    *(torch.zeros(1).expand(1 << 40), torch.zeros(0), torch.tensor(1 << 62), torch.zeros(3, dtype=torch.complex128)),
    *(torch.zeros(2, 0, 3), torch.zeros(2, 2).to_sparse(), torch.zeros(1).expand(1 << 20, 1 << 20)),
    torch.empty(1 << 40, device="meta"),
]

_TORCH: Pools = {
    "": [[], 1, None, {}, {1: 2}, {"x": torch.zeros(1)}, lambda *_: _bomb()],
    "**": _NATIVE,
    **{name: [*COUNTS, *_NATIVE] for name in ("global_step", "epoch", "global_steps", "global_samples")},
    **{name: [*TEXTS, *_NATIVE] for name in ("pytorch-lightning_version", "ds_version")},
    "callbacks": [{"x": {}}, {1: 2}, []],
    "callbacks/*": _NATIVE,
    "callbacks/*/best_k_models": [_scored, _scored, {"x": "y"}, {1: 2}, []],
    **{
        f"callbacks/*/{name}": [*NAMES, *_NATIVE]
        for name in ("best_model_path", "dirpath", "last_model_path", "kth_best_model_path")
    },
    "callbacks/*/kth_value": _NATIVE,
    "loops/**": [*COUNTS, *_NATIVE],
    "optimizer_states/*/param_groups/*/params": [[], [0, 0], [1 << 62], [-1], ["x"]],
}

KINDS = [
    Kind(named(r"(^|[./])resume/manifest\.json$"), read_manifest, write_manifest, _MANIFEST),
    Kind(named(r"^\.resume/journal\.jsonl$"), _read_lines, _write_lines, _JOURNAL),
    Kind(named(r"^\.resume/generation$"), json.loads, write_json, _GENERATION),
    Kind(named(r"^\.resume/status\.json$"), json.loads, write_json, _STATUS),
    Kind(named(r"[./]resume/.*\.json$"), json.loads, write_json, _TREE),
    Kind(named(r"\.safetensors$"), _read_header, _write_header, _HEADER),
    Kind(named(r"\.json$"), json.loads, write_json, _TRAINER),
    Kind(named(r"\.(ckpt|pt|pth|bin|pkl)$"), _read_torch, _write_torch, _TORCH),
]


def kind_of(path: Path) -> Kind | None:
    """Return the kind of a file, by its path in the run directory."""
    return next((kind for kind in KINDS if kind.is_of(path)), None)


# ---- Forging


def forged(document: bytes, kind: Kind, draw: random.Random, victims: Path) -> tuple[bytes, str]:
    """Return a document of a kind with an absurd value, and the place where that is.

    Raises:
        Exception: the document is none of that kind any more.
    """
    root = [kind.read(document)]
    spots: list[tuple[Any, Any]] = []
    while not spots:
        place = draw.choice(list(kind.pools))
        spots = list(_spots(root, 0, place.split("/") if place else []))
    holder, key = draw.choice(spots)
    value = draw.choice(list(kind.pools[place] if draw.random() < 0.9 else WRONG))
    if callable(value):
        value = value(draw, holder[key] if key in holder or isinstance(holder, list) else None)
    holder[key] = _placed(value, victims)
    return kind.write(root[0]), place


def _spots(holder: Any, key: Any, place: Sequence[str]) -> Iterator[tuple[Any, Any]]:
    """Yield what a place in a node leads to: the container and the key; a field that is not there is one, too."""
    if not place:
        yield holder, key
        return
    node = holder[key] if isinstance(holder, list) else holder.get(key)
    inner = list(node) if isinstance(node, dict) else list(range(len(node))) if isinstance(node, list) else []
    for child in inner if place[0] in ("*", "**") else [place[0]] if isinstance(node, dict) else []:
        yield from _spots(node, child, place[1:])
        if place[0] == "**":
            yield from _spots(node, child, place)


def _placed(value: Any, victims: Path) -> Any:
    """Return a value that names the directory of the victims."""
    if isinstance(value, str):
        return value.replace(VICTIMS, str(victims))
    if type(value) is list:
        return [_placed(each, victims) for each in value]
    if type(value) is dict:
        return {_placed(key, victims): _placed(each, victims) for key, each in value.items()}
    return value


# ---- The index of a sharded checkpoint


def sharded(directory: Path, draw: random.Random, victims: Path) -> list[str]:
    """Write a sharded checkpoint into a directory whose index names an absurd file; return the names of the files."""
    dcp.save({"weight": torch.zeros(6)}, checkpoint_id=directory, no_dist=True)
    index = directory / ".metadata"
    content = pickle.loads(index.read_bytes())
    key, stored = next(iter(content.storage_data.items()))
    field, value = draw.choice(
        [
            *(("relative_path", path) for path in (*PATHS, 3, None, ["x"])),
            *((name, count) for name in ("offset", "length") for count in COUNTS),
        ]
    )
    content.storage_data[key] = dataclasses.replace(stored, **{field: _placed(value, victims)})
    with index.open("wb") as file:
        pickle.dump(content, file)
    if value == "pipe":
        os.mkfifo(directory / "pipe")
    return [".metadata", stored.relative_path]
