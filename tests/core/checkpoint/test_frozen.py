"""A start that is frozen anywhere, while a later one saves the same step, harms nothing of it when it wakes up."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resume_adapters import KeepLast
from resume_adapters.core.storage.base import Storage
from resume_adapters.errors import FencedOff, ResumeError

import miniature
from faults import FreezingStorage
from miniature import Miniature, name

pytestmark = pytest.mark.usefixtures("shape")


def prepare(directory: Path) -> None:
    job = Miniature(directory)
    for step in (10, 20, 30):
        job.commit(step, best=10)
    job.run.close()


def save_next(directory: Path, storage: Storage) -> Miniature:
    job = Miniature(directory, storage=storage)
    job.commit(40, "forty", best=10)
    job.commit(50, "fifty", best=10)
    return job


def save_again(directory: Path, storage: Storage) -> Miniature:
    job = Miniature(directory, storage=storage)
    job.commit(30, "thirty again", best=10)
    job.commit(40, "forty", best=10)
    return job


def save_and_prune(directory: Path, storage: Storage) -> Miniature:
    job = Miniature(directory, storage=storage, keep=KeepLast(1))
    job.commit(40, "forty", best=10)
    job.commit(50, "fifty", best=10)
    return job


SAVES = (save_next, save_again, save_and_prune)


def content(directory: Path) -> dict[str, bytes]:
    """Return the files of the checkpoints of a run directory, by path."""
    files = [file for file in directory.rglob("*") if file.is_file() and not file.is_symlink()]
    paths = {file.relative_to(directory): file for file in sorted(files)}
    return {path.as_posix(): file.read_bytes() for path, file in paths.items() if path.parts[0] != ".resume"}


def later_start(directory: Path) -> dict[str, bytes]:
    """Resume, save the steps 30 or 40 and 50 again, and return what the checkpoints hold then."""
    job = Miniature(directory)
    for step in (40, 50) if job.step == 30 else (job.step,):
        job.commit(step, f"{step} of the later start", best=10)
    job.run.close()
    return content(directory)


def moments(prepared: Path, scratch: Path, work: Callable[[Path, Storage], Miniature]) -> Iterator[tuple[int, Path]]:
    """Yield each operation of some work, with a copy of a run directory to do it in."""
    shutil.copytree(prepared, scratch, symlinks=True)
    storage = FreezingStorage()
    work(scratch, storage)
    for at in range(len(storage.operations)):
        directory = scratch.with_name(f"{scratch.name}-{at}")
        shutil.copytree(prepared, directory, symlinks=True)
        yield at, directory
        shutil.rmtree(directory)


@pytest.mark.parametrize("work", SAVES)
def test_a_save_that_wakes_up_changes_nothing_of_a_later_start(
    tmp_path: Path, work: Callable[[Path, Storage], Miniature]
) -> None:
    prepare(tmp_path / "prepared")
    for at, directory in moments(tmp_path / "prepared", tmp_path / "run", work):
        found: list[dict[str, bytes]] = []
        storage = FreezingStorage(at, functools.partial(_add, found, directory))
        ended: ResumeError | None = None
        try:
            work(directory, storage).commit(60, best=10)
        except ResumeError as error:
            ended = error
        where = f"frozen before {storage.operations[at]}, operation {at} of {work.__name__}"
        (before,) = found
        begun = _took_over(storage, at)
        if begun:
            assert isinstance(ended, FencedOff), f"{where}: ended with {ended!r}"
            assert content(directory) == before, where
        assert name(10) in miniature.committed(directory), f"{where}: the best is gone"
        again = Miniature(directory)
        assert again.choice.rejected == (), where
        assert again.text in ("40 of the later start", "50 of the later start") or not begun, where
        again.run.close()
        assert not miniature.leftovers(directory), where


def _add(found: list[dict[str, bytes]], directory: Path) -> None:
    found.append(later_start(directory))


def _took_over(storage: FreezingStorage, at: int) -> bool:
    """Return whether the start owned the run directory before it was frozen."""
    done = storage.operations[:at]
    return any(operation == "replace" and path.name == "generation" for operation, path in done)
