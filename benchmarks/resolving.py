"""Time to find the latest valid of 1,000 checkpoints. They are small, so that digests do not dominate."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

import msgspec

from benchmarks import figure
from benchmarks.content import SmallContent
from benchmarks.figure import Figure
from resume_adapters.core.checkpoint.catalog import Catalog
from resume_adapters.core.checkpoint.layout import manifest_path
from resume_adapters.core.checkpoint.manifest import decode_manifest, encode_manifest
from resume_adapters.core.checkpoint.resolve import latest_valid
from resume_adapters.core.checkpoint.validity import CommitHistory, NoForeign
from resume_adapters.core.ranks import SingleProcess
from resume_adapters.core.run.run import ResumableRun
from resume_adapters.core.storage.groups import shared_by_all
from resume_adapters.core.storage.local import LocalStorage

GOAL_MILLISECONDS = 50
_COUNT = 1_000


def measure(repeats: int) -> list[Figure]:
    """Return the time to resolve, and the time of a whole start."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        _fill(directory)
        resolving, starting, committing = [], [], []
        for _ in range(repeats):
            resolving.append(_resolve(directory))
            starting.append(_start(directory))
            committing.append(_commit(directory))
    return [
        figure.of(
            f"latest valid among {_COUNT:,} checkpoints",
            resolving,
            "ms",
            GOAL_MILLISECONDS,
            detail="the newest is valid",
        ),
        figure.of(f"a whole start among {_COUNT:,} checkpoints", starting, "ms", detail="resolve, sweep, take over"),
        figure.of(f"a commit among {_COUNT:,} checkpoints", committing, "ms", detail="all are kept"),
    ]


def _fill(directory: Path) -> None:
    """Commit one checkpoint and copy it: the same files, with a manifest for each step."""
    run = ResumableRun(directory, ranks=SingleProcess())
    run.open()
    run.saver.save("checkpoint-1", 1, SmallContent(1))
    run.saver.flush()
    run.close()
    first = directory / "checkpoint-1"
    manifest = decode_manifest(manifest_path(LocalStorage(), first).read_bytes())
    for step in range(2, _COUNT + 1):
        copy = directory / f"checkpoint-{step}"
        shutil.copytree(first, copy)
        manifest_path(LocalStorage(), copy).write_bytes(encode_manifest(msgspec.structs.replace(manifest, step=step)))


def _resolve(directory: Path) -> float:
    ranks = SingleProcess()
    begun = time.perf_counter()
    choice = latest_valid(Catalog(LocalStorage(), directory), ranks, shared_by_all(ranks), NoForeign(), CommitHistory())
    taken = time.perf_counter() - begun
    assert choice.checkpoint is not None
    assert choice.checkpoint.step == _COUNT
    return taken * 1e3


def _start(directory: Path) -> float:
    begun = time.perf_counter()
    run = ResumableRun(directory, ranks=SingleProcess())
    run.open()
    taken = time.perf_counter() - begun
    run.close()
    return taken * 1e3


def _commit(directory: Path) -> float:
    run = ResumableRun(directory, ranks=SingleProcess())
    run.open()
    for step in (_COUNT + 1, _COUNT + 2):  # the first imports what writes tensors
        begun = time.perf_counter()
        run.saver.save(f"checkpoint-{step}", step, SmallContent(step))
        run.saver.flush()
        taken = time.perf_counter() - begun
    run.close()
    for step in (_COUNT + 1, _COUNT + 2):
        shutil.rmtree(directory / f"checkpoint-{step}")
    return taken * 1e3
