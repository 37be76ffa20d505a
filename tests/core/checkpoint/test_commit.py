"""A kill before any file operation leaves every committed checkpoint usable."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from resume_adapters import KeepLast
from resume_adapters.core.checkpoint.commit import TRANSITIONS
from resume_adapters.core.checkpoint.layout import CheckpointState, is_unfinished, state_of
from resume_adapters.core.checkpoint.remove import supersede
from resume_adapters.core.storage.base import Storage
from resume_adapters.core.storage.local import LocalStorage
from resume_adapters.errors import NoValidCheckpoint, SaveFailed
from selection import often

import faults
import miniature
from faults import Crash, CrashingStorage
from miniature import Miniature, MiniatureContent, name, native, own

pytestmark = pytest.mark.usefixtures("shape")

FAULTS: dict[str, Callable[[Path, int | None], CrashingStorage]] = {
    "killed": lambda root, at: CrashingStorage(at),
    "torn": lambda root, at: CrashingStorage(at, torn=True),
}

BEFORE = {10: "ten", 20: "twenty", 30: "thirty"}
"""The committed checkpoints with which each scenario begins; 10 is the best."""


def prepare(directory: Path) -> None:
    job = Miniature(directory)
    for step, text in BEFORE.items():
        job.commit(step, text, best=10)
    job.run.close()


def save_next(directory: Path, storage: Storage) -> None:
    Miniature(directory, storage=storage).commit(40, "forty", best=10)


def save_and_prune(directory: Path, storage: Storage) -> None:
    Miniature(directory, storage=storage, keep=KeepLast(1)).commit(40, "forty", best=10)


def save_again(directory: Path, storage: Storage) -> None:
    Miniature(directory, storage=storage).commit(30, "thirty again", best=10)


def save_again_twice(directory: Path, storage: Storage) -> None:
    job = Miniature(directory, storage=storage, keep=KeepLast(2))
    job.commit(30, "thirty once more", best=10)
    job.commit(30, "thirty again", best=10)


def save_again_and_prune(directory: Path, storage: Storage) -> None:
    job = Miniature(directory, storage=storage, keep=KeepLast(1))
    job.commit(30, "thirty again", best=10)
    job.commit(40, "forty", best=10)


def save_another_step_under_the_name(directory: Path, storage: Storage) -> None:
    Miniature(directory, storage=storage).commit(40, "forty", best=10, under=name(30))


def save_after_damage(directory: Path, storage: Storage) -> None:
    faults.flip(native(directory / name(30)))
    job = Miniature(directory, storage=storage, keep=KeepLast(1))
    assert job.step == 20
    job.commit(30, "thirty again", best=10)


SCENARIOS = {
    each.__name__: (each, allowed)
    for each, allowed in (
        (save_next, {30: {"thirty"}, 40: {"forty"}}),
        (save_and_prune, {30: {"thirty"}, 40: {"forty"}}),
        (save_again, {30: {"thirty", "thirty again"}}),
        (save_again_twice, {30: {"thirty", "thirty once more", "thirty again"}}),
        (save_another_step_under_the_name, {30: {"thirty"}, 40: {"forty"}}),
        (save_after_damage, {20: {"twenty"}, 30: {"thirty again"}}),
    )
}


def operations(prepared: Path, scratch: Path, scenario: Callable[[Path, Storage], None], fault: str) -> list[int]:
    """Return the numbers of the operations of a scenario before which the fault is unlike the others.

    A process that dies before anything but a write leaves the same, whatever becomes of a torn write.
    """
    shutil.copytree(prepared, scratch, symlinks=True)
    storage = FAULTS[fault](scratch, None)
    scenario(scratch, storage)
    return [
        number
        for number, (what, _) in enumerate(storage.operations)
        if fault == "killed" or what in ("write", "append")
    ]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    "scenario",
    # The others do in one start a part of what these do.
    often(SCENARIOS, "save_and_prune", "save_again_twice", "save_after_damage"),
)
def test_a_kill_before_any_operation_resumes_from_a_whole_checkpoint(tmp_path: Path, scenario: str, fault: str) -> None:
    work, allowed = SCENARIOS[scenario]
    prepare(tmp_path / "prepared")
    numbers = operations(tmp_path / "prepared", tmp_path / "counted", work, fault)
    assert len(numbers) > (20 if fault == "killed" else 4)
    outcomes = set()
    for at in numbers:
        directory = tmp_path / str(at)
        shutil.copytree(tmp_path / "prepared", directory, symlinks=True)
        storage = FAULTS[fault](directory, at)
        with pytest.raises(Crash):
            work(directory, storage)
        job = Miniature(directory, keep=KeepLast(1))
        where = f"stopped before {storage.operations[-1]}, operation {at}"
        assert job.text in allowed.get(job.step, ()), f"{where}: resumed {job.step} {job.text!r}"
        assert name(10) in miniature.committed(directory), f"{where}: the best is gone"
        outcomes.add((job.step, job.text))
        job.commit(50, best=10)
        assert miniature.committed(directory) == {name(10): 10, name(50): 50}, where
        assert not miniature.leftovers(directory), where
        again = Miniature(directory)
        assert (again.step, again.choice.rejected) == (50, ())
        shutil.rmtree(directory)
    assert len(outcomes) > 1, "no kill fell before the commit, or none after it"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_start_that_is_killed_at_any_operation_can_be_repeated(tmp_path: Path, fault: str) -> None:
    """A start sets aside what is damaged, removes what a crashed save left, and restores superseded ones."""
    prepared = tmp_path / "prepared"
    prepare(prepared)
    at_commit = operations(prepared, tmp_path / "counted", save_again, "killed")
    for at in at_commit:  # the last kill that leaves the former save moved aside
        shutil.rmtree(tmp_path / "counted")
        shutil.copytree(prepared, tmp_path / "counted", symlinks=True)
        with pytest.raises(Crash):
            save_again(tmp_path / "counted", CrashingStorage(at))
        moved = tmp_path / "counted" / f"{name(30)}.superseded"
        if moved.exists() and not (own(tmp_path / "counted" / name(30)) / "manifest.json").exists():
            shutil.rmtree(tmp_path / "unfinished", ignore_errors=True)
            shutil.copytree(tmp_path / "counted", tmp_path / "unfinished", symlinks=True)
    prepared = tmp_path / "unfinished"
    newer = prepared / name(60)
    miniature.copy(prepared / name(20), newer)
    faults.flip(own(newer) / "manifest.json")

    numbers = operations(prepared, tmp_path / "open", lambda path, storage: Miniature(path, storage=storage), fault)
    assert numbers
    for at in numbers:
        directory = tmp_path / str(at)
        shutil.copytree(prepared, directory, symlinks=True)
        with pytest.raises(Crash):
            Miniature(directory, storage=FAULTS[fault](directory, at))
        job = Miniature(directory)
        assert (job.step, job.text) == (30, "thirty")
        assert job.choice.checkpoint is not None
        assert job.choice.checkpoint.path == directory / name(30)
        assert miniature.set_aside(directory) == [f"{name(60)}.1"]
        assert not miniature.leftovers(directory)
        assert set(miniature.committed(directory).values()) == set(BEFORE)
        shutil.rmtree(directory)


@pytest.mark.parametrize("fault", FAULTS)
def test_starting_from_scratch_loses_nothing_wherever_it_is_killed(tmp_path: Path, fault: str) -> None:
    """resume="scratch!" moves checkpoints aside; killed half-way and repeated, each is still there, whole."""
    prepared = tmp_path / "prepared"
    prepare(prepared)

    def start(path: Path, storage: Storage) -> None:
        assert Miniature(path, storage=storage, resume="scratch!").step == 0

    for at in operations(prepared, tmp_path / "counted", start, fault):
        directory = tmp_path / str(at)
        shutil.copytree(prepared, directory, symlinks=True)
        with pytest.raises(Crash):
            start(directory, FAULTS[fault](directory, at))
        start(directory, LocalStorage())
        assert miniature.committed(directory) == {}
        assert miniature.set_aside(directory) == [f"{name(step)}.1" for step in BEFORE]
        for step, text in BEFORE.items():
            start_from = directory / ".resume" / "set-aside" / f"{name(step)}.1"
            other = Miniature(tmp_path / f"{at}-{step}", resume=start_from)
            assert (other.step, other.text) == (step, text)
            shutil.rmtree(tmp_path / f"{at}-{step}")
        shutil.rmtree(directory)


@pytest.mark.parametrize("damage", faults.DAMAGES)
def test_any_one_file_damaged_takes_the_checkpoint_before_and_names_the_file(tmp_path: Path, damage: str) -> None:
    prepare(tmp_path / "prepared")
    files = faults.files_of(tmp_path / "prepared" / name(30))
    assert {file.name for file in files} == {
        "manifest.json",
        native(tmp_path / name(30)).name,
        "rank-00000.json",
        "ema.json",
        "ema.safetensors",
    }
    for file in files:
        directory = tmp_path / file.name
        shutil.copytree(tmp_path / "prepared", directory, symlinks=True)
        faults.DAMAGES[damage](directory / file.relative_to(tmp_path / "prepared"))
        job = Miniature(directory, keep=KeepLast(1))
        assert (job.step, job.text) == (20, "twenty")
        assert [each.path.name for each in job.choice.rejected] == [name(30)]
        assert file.name in job.choice.rejected[0].reason
        assert miniature.set_aside(directory) == [f"{name(30)}.1"]
        job.run.pruner.prune(job.run.storage_group, name(10))
        assert set(miniature.committed(directory).values()) == {10, 20}


@pytest.mark.parametrize("damage", faults.DAMAGES)
def test_pruning_counts_no_damaged_checkpoint_as_the_one_to_resume_from(tmp_path: Path, damage: str) -> None:
    prepare(tmp_path)
    job = Miniature(tmp_path, keep=KeepLast(1))
    faults.DAMAGES[damage](native(tmp_path / name(30)))
    job.run.pruner.prune(job.run.storage_group, None)
    assert own(tmp_path / name(30)).is_dir(), "what is damaged is not removed either"
    assert Miniature(tmp_path).text == "twenty"


def test_saving_again_over_a_damaged_checkpoint_sets_the_damaged_one_aside(tmp_path: Path) -> None:
    job = Miniature(tmp_path, keep=KeepLast(1))
    job.commit(10)
    faults.cut(native(tmp_path / name(10)))
    job.commit(10, "again")
    assert miniature.committed(tmp_path) == {name(10): 10}
    assert miniature.set_aside(tmp_path) == [f"{name(10)}.superseded.1"]
    assert Miniature(tmp_path).text == "again"


def test_nothing_valid_is_an_error_that_lists_what_there_is(tmp_path: Path) -> None:
    prepare(tmp_path)
    for step, damage in zip(BEFORE, (faults.cut, faults.remove, faults.flip), strict=True):
        damage(native(tmp_path / name(step)))
    with pytest.raises(NoValidCheckpoint) as refused:
        Miniature(tmp_path)
    for step in BEFORE:
        assert f"{name(step)}: {native(Path(name(step))).name}" in str(refused.value)
    assert len(miniature.committed(tmp_path)) == 3, "a refused start moves nothing"
    assert Miniature(tmp_path, resume="scratch!").step == 0


def test_the_best_outlives_a_failed_second_save_of_its_step(tmp_path: Path) -> None:
    """While its step is saved again the best has another name; retention knows it by that name too."""
    prepare(tmp_path)
    storage = CrashingStorage()
    job = Miniature(tmp_path, storage=storage, keep=KeepLast(1))
    supersede(storage, tmp_path / name(30), lambda: None)
    job.commit(40, best=30)
    assert miniature.committed(tmp_path) == {f"{name(30)}.superseded": 30, name(40): 40}
    assert Miniature(tmp_path).committed() == {name(30): 30, name(40): 40}


class Watching(CrashingStorage):
    """A disk that notes what becomes of the name of each checkpoint, operation by operation."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory
        self.seen: set[tuple[CheckpointState, CheckpointState]] = set()
        self._states = self._look()

    def _look(self) -> dict[int, CheckpointState]:
        return {step: state_of(LocalStorage(), self.directory / name(step)) for step in (10, 20, 30, 40)}

    def watch(self) -> None:
        states = self._look()
        self.seen |= {(self._states[step], states[step]) for step in states}
        self._states = states

    def _count(self, operation: str, path: Path) -> None:
        self.watch()  # what the operation before has made of it
        super()._count(operation, path)


def test_names_of_checkpoints_change_their_state_only_as_the_table_says(tmp_path: Path) -> None:
    """In a save, and in the start after a kill before each of its operations."""
    prepare(tmp_path / "prepared")
    seen = set()
    for work in (save_again_and_prune, save_after_damage):
        numbers = operations(tmp_path / "prepared", tmp_path / "counted", work, "killed")
        for at in [None, *numbers]:
            directory = tmp_path / "run"
            shutil.copytree(tmp_path / "prepared", directory, symlinks=True)
            if at is None:
                whole = Watching(directory)
                work(directory, whole)
                whole.watch()
                seen |= whole.seen  # up to its crash each of the others does the same
            else:
                with contextlib.suppress(Crash):
                    work(directory, CrashingStorage(at))
            then = Watching(directory)
            Miniature(directory, storage=then).run.close()
            then.watch()
            seen |= then.seen
            shutil.rmtree(directory)
        shutil.rmtree(tmp_path / "counted")
    changes = {(before, after) for before, after in seen if before is not after}
    table = {(before, after) for before, states in TRANSITIONS.items() for after in states}
    assert changes <= table
    never_here = {CheckpointState.DAMAGED, CheckpointState.FOREIGN}  # a disk or a person makes these
    unseen = {(before, after) for before, after in table - changes if not {before, after} & never_here}
    assert unseen <= {(CheckpointState.COMMITTED, CheckpointState.PENDING)} if not miniature.FILES else not unseen


@pytest.mark.parametrize("state", [CheckpointState.DAMAGED, CheckpointState.FOREIGN])
def test_what_has_the_name_of_a_save_and_is_no_checkpoint_is_set_aside(tmp_path: Path, state: CheckpointState) -> None:
    prepare(tmp_path)
    job = Miniature(tmp_path)
    (own(tmp_path / name(20)) / "manifest.json").unlink()
    if state is CheckpointState.FOREIGN:
        shutil.rmtree(own(tmp_path / name(20)))
    assert state_of(LocalStorage(), tmp_path / name(20)) is state
    job.commit(20, "again")
    assert miniature.set_aside(tmp_path) == [f"{name(20)}.1"]
    assert state_of(LocalStorage(), tmp_path / name(20)) is CheckpointState.COMMITTED


@pytest.mark.parametrize("twice", [True, False])
def test_what_a_script_writes_under_the_name_of_a_save_is_a_part_of_it(tmp_path: Path, twice: bool) -> None:
    """It knows the name, and may write there while the checkpoint has another place; what is there twice is kept."""
    job = Miniature(tmp_path)
    target = tmp_path / name(10)

    def parts() -> dict[str, Any]:
        if miniature.FILES:
            target.write_text("a file of the script")
        else:
            target.mkdir()
            (target / "adapter.bin").write_text("of the script")
            if twice:
                (target / "model.bin").write_text("there already")
        return {"epoch": 1.0, "reason": "scheduled"}

    content = MiniatureContent(job.run, "state at 10", 10, None, None)
    content.capture = lambda: (parts(), MiniatureContent.capture(content))[1]  # type: ignore[method-assign]
    job.run.saver.save(target.name, 10, content, is_file=miniature.FILES)
    job.run.saver.flush()
    again = Miniature(tmp_path)
    assert (again.step, again.text) == (10, "state at 10")
    manifest = again.choice.checkpoint and again.choice.checkpoint.manifest
    assert manifest
    assert ("adapter.bin" in {entry.path for entry in manifest.files}) is not miniature.FILES
    assert miniature.set_aside(tmp_path) == [f"{name(10)}.1"] * (twice or miniature.FILES)
    if not miniature.set_aside(tmp_path):
        return
    left = tmp_path / ".resume" / "set-aside" / f"{name(10)}.1"
    assert (left if miniature.FILES else left / "model.bin").read_text() in ("a file of the script", "there already")


def test_what_a_script_writes_beside_a_save_goes_into_the_run_directory(tmp_path: Path) -> None:
    job = Miniature(tmp_path)
    (tmp_path / "samples").mkdir()
    content = MiniatureContent(job.run, "state at 10", 10, None, None)

    def save(directory: Path) -> None:
        MiniatureContent.save(content, directory)
        (directory.parent / "tokenizer.json").write_text("of the script")
        (directory.parent / "samples").mkdir()

    content.save = save  # type: ignore[method-assign]
    job.run.saver.save(name(10), 10, content, is_file=miniature.FILES)
    job.run.saver.flush()
    assert (tmp_path / "tokenizer.json").read_text() == "of the script"
    assert not miniature.leftovers(tmp_path)
    assert Miniature(tmp_path).step == 10


class Unreadable(LocalStorage):
    """A disk that fails: what is written is lost, and nobody can tell who owns the run directory."""

    fails = False

    def write(self, path: Path, content: bytes) -> None:
        if self.fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().write(path, content)

    def read(self, path: Path) -> bytes:
        if self.fails and path.name == "generation":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(path)


def test_a_failing_disk_is_named_also_where_it_hides_the_owner(tmp_path: Path) -> None:
    storage = Unreadable()
    job = Miniature(tmp_path, storage=storage)
    job.commit(10)

    def fail() -> dict[str, Any]:
        storage.fails = True
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.raises(SaveFailed, match="Input/output error"):
        job.save(20, describe=fail)


def test_a_leftover_that_another_start_removes_at_the_same_moment_is_removed(tmp_path: Path) -> None:
    prepare(tmp_path)
    leftover = tmp_path / ".resume" / "begin-70"
    leftover.mkdir()
    shutil.copytree(tmp_path, tmp_path.with_name(f"{tmp_path.name}-counted"), symlinks=True)
    counting = faults.FreezingStorage()
    Miniature(tmp_path.with_name(f"{tmp_path.name}-counted"), storage=counting)
    shutil.rmtree(tmp_path.with_name(f"{tmp_path.name}-counted"))
    at = next(number for number, (_, path) in enumerate(counting.operations) if path.name.endswith("-begin-70"))
    Miniature(tmp_path, storage=faults.FreezingStorage(at, leftover.rmdir))
    assert not miniature.leftovers(tmp_path)


def test_the_marker_has_the_name_of_its_checkpoint_when_it_is_committed(tmp_path: Path) -> None:
    """Otherwise what is left undone after a commit would not be done by the next start."""
    job = Miniature(tmp_path, storage=(storage := faults.FailingStorage(errno.EIO, 10**9, only=("remove_file",))))
    job.commit(10)
    storage.fail_at = len(storage.operations)
    with pytest.raises(SaveFailed, match="is committed, but what follows"):
        job.commit(20)
    assert storage.operations[-1][1].name == "pending"
    assert is_unfinished(LocalStorage(), tmp_path / miniature.name(20))
