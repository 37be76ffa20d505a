"""A start that is frozen anywhere, while a later one saves the same step, harms nothing of it when it wakes up."""

from __future__ import annotations

import contextlib
import functools
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from resume_adapters import KeepLast
from resume_adapters.core.checkpoint.writer import Captured
from resume_adapters.core.saving.engine import SaveEngine, SaveRequest
from resume_adapters.core.saving.staging import StagingOptions
from resume_adapters.core.storage.base import Storage
from resume_adapters.errors import FencedOff, ResumeError
from selection import often

import faults
import miniature
from faults import FreezingStorage
from miniature import GivenContent, Miniature, name, native

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


def save_again_and_prune(directory: Path, storage: Storage) -> Miniature:
    """Do in one start what the others do one by one."""
    job = Miniature(directory, storage=storage, keep=KeepLast(1))
    job.commit(30, "thirty again", best=10)
    job.commit(40, "forty", best=10)
    return job


SAVES = {each.__name__: each for each in (save_next, save_again, save_and_prune, save_again_and_prune)}


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


@pytest.mark.parametrize("save", often(SAVES, "save_again_and_prune"))
def test_a_save_that_wakes_up_changes_nothing_of_a_later_start(tmp_path: Path, save: str) -> None:
    work = SAVES[save]
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


class HeldEngine:
    """Commits a save only when it is told to; everything else the engine does that a run has."""

    def __init__(self, engine: SaveEngine) -> None:
        self.engine = engine
        self.requests: list[SaveRequest] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def submit(self, request: SaveRequest) -> None:
        self.requests.append(request)

    def commit(self) -> None:
        for each in self.requests:
            self.engine.submit(each)
        self.engine.drain()


class Later:
    """A later start, with a save of step 40 that is written and not yet committed."""

    def __init__(self, directory: Path) -> None:
        self.job = Miniature(directory)
        self.engine = HeldEngine(self.job.run.saver.engine)
        self.job.run.saver.engine = self.engine
        self.job.save(40, "forty of the later start", best=10)


def leave_leftovers(directory: Path) -> None:
    """Leave what crashes leave: the newest checkpoint damaged, a pending one, one that is moved aside, and more."""
    prepare(directory)
    Miniature(directory).commit(60, best=10)
    faults.flip(native(directory / name(60)))
    crashed = Miniature(directory)
    crashed.run.saver.engine = HeldEngine(crashed.run.saver.engine)
    crashed.save(40, best=10)
    control = directory / ".resume"
    miniature.copy(directory / name(20), control / f"begin-{name(70)}")
    miniature.copy(directory / name(20), control / f"remove-{name(80)}")
    for leftover in (control / ".status.json.0123abcd.tmp", control / ".generation.tmp", directory / ".latest.tmp"):
        leftover.write_text("half of a")


def start(directory: Path, storage: Storage) -> Miniature:
    return Miniature(directory, storage=storage, keep=KeepLast(3))


def test_of_two_starts_at_once_one_owns_the_run_directory_and_loses_nothing(tmp_path: Path) -> None:
    """One is frozen anywhere in its start, while the other starts and writes a checkpoint that is not yet committed."""
    leave_leftovers(tmp_path / "prepared")
    for at, directory in moments(tmp_path / "prepared", tmp_path / "run", start):
        later: list[Later] = []
        storage = FreezingStorage(at, lambda: later.append(Later(directory)))  # noqa: B023
        ended: list[ResumeError] = []
        try:
            start(directory, storage).commit(40, "forty of the earlier start", best=10)
        except ResumeError as error:
            ended.append(error)
        try:
            later[0].engine.commit()
        except ResumeError as error:
            ended.append(error)
        where = f"frozen before {storage.operations[at]}, operation {at}"
        assert [type(each) for each in ended] == [FencedOff], f"{where}: {ended}"
        again = Miniature(directory)
        assert (again.step, again.choice.rejected) == (40, ()), where
        who = "later" if _took_over(storage, at) else "earlier"
        assert again.text == f"forty of the {who} start", where
        assert name(10) in miniature.committed(directory), f"{where}: the best is gone"
        assert not miniature.leftovers(directory), where


def test_a_prune_that_wakes_up_leaves_what_a_later_start_resumes_from(tmp_path: Path) -> None:
    """The newest checkpoint, for which the older ones were to go, is damaged meanwhile: the later start needs one."""
    prepare(tmp_path / "prepared")

    def save(directory: Path, storage: Storage) -> Miniature:
        job = Miniature(directory, storage=storage, keep=KeepLast(1))
        job.commit(40, "forty", best=10)
        return job

    pruned = 0
    for at, directory in moments(tmp_path / "prepared", tmp_path / "run", save):
        later: list[Miniature] = []

        def resume(directory: Path = directory, later: list[Miniature] = later) -> None:
            if name(40) in miniature.committed(directory):
                faults.flip(native(directory / name(40)))
                later.append(Miniature(directory))

        with contextlib.suppress(FencedOff):
            save(directory, FreezingStorage(at, resume))
        if later and later[0].step == 30:
            pruned += 1
            again = Miniature(directory)
            assert (again.step, again.text) == (30, "state at 30"), f"frozen before operation {at}"
            assert name(10) in miniature.committed(directory)
    assert pruned


class CopiedContent(GivenContent):
    """Weights that are copied, and a field that is known only once they are; ``meanwhile`` is called before that."""

    def __init__(self, meanwhile: Callable[[], object]) -> None:
        super().__init__(lambda path: torch.save({"weights": torch.rand(1 << 15)}, native(path)))
        self.meanwhile = meanwhile

    def capture(self) -> Captured:
        return replace(super().capture(), rank_state={"text": "copied", "digest": None}, complete=self.complete)

    def complete(self) -> dict[str, Any]:
        self.meanwhile()
        return {"digest": "of the copied weights"}


def test_what_is_known_only_once_the_weights_are_copied_is_not_written_into_a_later_start(tmp_path: Path) -> None:
    found: list[dict[str, bytes]] = []
    job = Miniature(tmp_path / "run", staging=StagingOptions("memory"))
    for step in (10, 20):
        job.run.saver.save(name(step), step, CopiedContent(bool), is_file=miniature.FILES)
        job.run.saver.flush()
    checkpoint = job.run.require_valid(job.run.directory / name(20))
    assert job.run.reader(checkpoint).rank_tree(0) == {"text": "copied", "digest": "of the copied weights"}

    def later() -> None:
        Miniature(tmp_path / "run").commit(30, "thirty of the later start")
        found.append(content(tmp_path / "run"))

    job.run.saver.save(name(30), 30, CopiedContent(later), is_file=miniature.FILES)
    with pytest.raises(FencedOff):
        job.run.saver.flush()
    assert content(tmp_path / "run") == found[0]
    assert Miniature(tmp_path / "run").text == "thirty of the later start"
