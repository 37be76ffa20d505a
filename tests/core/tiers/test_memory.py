"""The tier in memory: what it holds, what a start takes from it, and what it never costs a run."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from resume_adapters import KeepLast, Memory, Remote
from resume_adapters.core.checkpoint.validity import read_manifest
from resume_adapters.core.ranks import SingleProcess
from resume_adapters.core.run.step_control import Decision
from resume_adapters.core.run_directory.status import RunState
from resume_adapters.core.saving.cadence import SHORTEST_IN_MEMORY, Cadence, optimal
from resume_adapters.core.session.options import TextOptions
from resume_adapters.core.storage.base import Entry
from resume_adapters.core.storage.local import LocalStorage, make_private_directory
from resume_adapters.core.tiers.options import mirror_of, require_mirrors
from resume_adapters.errors import CheckpointsExist, FencedOff, RunDirectoryUnusable, UnsupportedSetting

import faults
import miniature
from miniature import Miniature, MiniatureContent


class Node:
    """A run directory, and a file system in memory."""

    def __init__(self, directory: Path) -> None:
        self.run_directory, self.memory = directory / "run", directory / "memory"
        self.memory.mkdir(parents=True)

    def start(self, **options: Any) -> Miniature:
        settings = {name: options.pop(name) for name in ("every", "save_every", "mtbf") if name in options}
        memory = Memory(directory=str(self.memory), **settings)
        job = Miniature(self.run_directory, **{"mirror": [memory], **options})
        job.run.begin(job.step, 0.0)
        return job

    def resumed(self, **options: Any) -> tuple[int, str | None]:
        """Start, and leave as if killed; return the step and the text of what was resumed."""
        job = self.start(**options)
        kill(job)
        return job.step, job.text

    @property
    def place(self) -> Path:
        (found,) = self.memory.glob(f"resume-adapters-{os.geteuid()}/*")
        return found

    def held(self) -> list[int]:
        """Return the steps of the checkpoints in memory."""
        return sorted(miniature.committed(self.place).values())


@pytest.fixture
def node(tmp_path: Path, shape: None) -> Node:
    return Node(tmp_path)


def save_to_memory(job: Miniature, step: int) -> None:
    content = MiniatureContent(job.run, f"state at {step}", step, None, None)
    job.run.saver.save_to_memory(miniature.name(step), step, content, is_file=miniature.FILES)
    job.run.saver.flush()


def kill(job: Miniature) -> None:
    """Undo what a run does to this process, without its end: files stay as they are where a process is killed."""
    job.run.close()


def test_the_newest_two_commits_are_in_memory_with_the_files_and_the_manifest_of_the_disk(node: Node) -> None:
    job = node.start(keep=KeepLast(1))
    for step in (10, 20, 30):
        job.commit(step)
    assert node.held() == [20, 30]
    assert node.place.stat().st_mode & 0o777 == node.place.parent.stat().st_mode & 0o777 == 0o700
    disk, memory = (each / miniature.name(30) for each in (node.run_directory, node.place))
    for of_disk in (miniature.native(disk), *miniature.own(disk).iterdir()):
        at = of_disk.relative_to(node.run_directory)
        assert (node.place / at).read_bytes() == of_disk.read_bytes()
    assert sorted(each.name for each in miniature.own(memory).iterdir()) == sorted(
        each.name for each in miniature.own(disk).iterdir()
    )
    assert miniature.leftovers(node.place) == []
    kill(job)
    assert node.held() == [20, 30]


def test_a_start_takes_what_is_newer_in_memory_and_the_disk_where_it_is_not(node: Node) -> None:
    job = node.start(save_every=1)
    job.commit(10)
    save_to_memory(job, 11)
    save_to_memory(job, 12)
    kill(job)
    assert miniature.committed(node.run_directory) == {miniature.name(10): 10}
    job = node.start(save_every=1)
    assert (job.step, job.text) == (12, "state at 12")
    assert sorted(job.committed().values()) == [10, 12]
    job.commit(20)
    kill(job)
    for held in miniature.markers(node.place):
        miniature.native(held).unlink()
    assert node.resumed(save_every=1) == (20, "state at 20")


def test_saves_to_memory_alone_are_a_ring_and_no_checkpoint_of_the_run_directory(node: Node) -> None:
    job = node.start(save_every=1)
    for step in (1, 2, 3):
        save_to_memory(job, step)
    assert node.held() == [2, 3]
    assert (job.run.last_commit, job.committed()) == (None, {})
    job.commit(3)  # as a stop does
    assert job.run.last_commit == 3
    assert node.held() == [2, 3]
    assert miniature.leftovers(node.place) == []
    kill(job)


def test_copies_in_memory_leave_no_file_open(node: Node) -> None:
    """A run has more saves than a process may have open files."""
    job = node.start()
    job.commit(1)
    before = miniature.open_files()
    for step in (2, 3, 4):
        job.commit(step)
    assert miniature.left_open(before) == {}
    kill(job)


@pytest.mark.parametrize("damage", ["flip", "lack", "manifest"])
def test_what_is_damaged_in_memory_is_not_used(node: Node, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    job = node.start(save_every=1)
    job.commit(10)
    save_to_memory(job, 11)
    save_to_memory(job, 12)
    kill(job)
    newest = node.place / miniature.name(12)
    if damage == "flip":
        faults.flip(miniature.native(newest))
    elif damage == "lack":
        miniature.native(newest).write_bytes(b"")
    else:
        (miniature.own(newest) / "manifest.json").write_bytes(b"{")
    job = node.start(save_every=1)
    assert (job.step, job.text) == (11, "state at 11")
    assert "is not used" in caplog.text
    assert node.held() == [11]
    kill(job)


def test_of_every_kth_commit_there_is_a_copy(node: Node) -> None:
    job = node.start(every=2)
    for step in (10, 20, 30, 40):
        job.commit(step)
    assert node.held() == [10, 30]
    kill(job)


@pytest.mark.parametrize("state", [RunState.FINISHED, RunState.STOPPED])
def test_a_run_that_ends_gives_the_memory_back(node: Node, state: RunState) -> None:
    job = node.start()
    job.commit(10)
    place = node.place
    job.run.set_state(state, step=10, epoch=1.0)
    job.run.finish_copies()
    assert not place.exists()
    kill(job)


def test_a_run_directory_that_is_made_again_is_another_run(node: Node) -> None:
    job = node.start(save_every=1)
    save_to_memory(job, 5)
    kill(job)
    shutil.rmtree(node.run_directory)
    assert node.resumed()[0] == 0


def test_a_run_directory_that_is_copied_or_moved_is_another_run(node: Node) -> None:
    job = node.start(save_every=1)
    job.commit(1)
    save_to_memory(job, 3)
    kill(job)
    original, copied = node.run_directory, node.run_directory.with_name("copied")
    shutil.copytree(original, copied, symlinks=True)
    node.run_directory = copied
    assert node.resumed(save_every=1)[0] == 1
    node.run_directory = original
    job = node.start(save_every=1)
    assert (job.step, job.text) == (3, "state at 3")
    save_to_memory(job, 4)
    kill(job)
    linked = original.with_name("linked")
    linked.symlink_to(original)
    node.run_directory = linked
    job = node.start(save_every=1)
    assert job.step == 4, "which is on the disk from now on"
    save_to_memory(job, 5)
    kill(job)
    node.run_directory = original.rename(original.with_name("moved"))
    assert node.resumed(save_every=1)[0] == 4


class OfAnotherUser(LocalStorage):
    """A disk of which a directory is closed to this user."""

    def __init__(self, closed: Path) -> None:
        super().__init__()
        self.closed = closed

    def stamp(self, path: Path) -> tuple[int, int, int]:
        if path.is_relative_to(self.closed):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return super().stamp(path)


def test_a_copy_of_what_another_user_has_is_resumed_from(node: Node) -> None:
    """Of the original nothing can be read, and what that user has in memory is in another directory."""
    job = node.start()
    job.commit(1)
    kill(job)
    original, copied = node.run_directory, node.run_directory.with_name("copied")
    shutil.copytree(original, copied, symlinks=True)
    node.run_directory = copied
    assert node.resumed(storage=OfAnotherUser(original)) == (1, "state at 1")


def test_scratch_regards_what_is_in_memory(node: Node) -> None:
    job = node.start(save_every=1)
    save_to_memory(job, 5)
    kill(job)
    with pytest.raises(CheckpointsExist, match="holds 1 committed"):
        node.start(resume="scratch")
    job = node.start(resume="scratch!")
    assert (job.step, node.held()) == (0, [])
    kill(job)


def test_a_kill_before_any_operation_of_a_save_to_memory_resumes_from_the_newest_that_is_whole(
    tmp_path: Path, shape: None
) -> None:
    counting, count = faults.CrashingStorage(), 0
    for at in range(1000):
        node = Node(tmp_path / str(at))
        storage = faults.CrashingStorage() if at else counting
        job = node.start(storage=storage, save_every=1)
        job.commit(10)
        save_to_memory(job, 11)
        begun = len(storage.operations)
        if at:
            storage.crash_at = begun + at - 1
            with pytest.raises(faults.Crash):
                save_to_memory(job, 12)
            storage.crash_at = None
        else:
            save_to_memory(job, 12)
            count = len(storage.operations) - begun
        kill(job)
        again = node.start(save_every=1)
        assert again.step in ((11, 12) if at else (12,))
        assert again.text == f"state at {again.step}"
        assert miniature.leftovers(node.place) == []
        kill(again)
        if at == count:
            break
    assert count > 10


# ---- What it never costs a run


class MemoryFault(LocalStorage):
    """A disk that works, beside a memory of which operations fail.

    Args:
        memory: where that is.
    """

    def __init__(self, memory: Path) -> None:
        super().__init__()
        self.memory, self.failing, self.free = memory, 0, 10**9
        self.does_not_remove = self.does_not_list = False

    def free_bytes(self, path: Path) -> int:
        if self.failing == errno.ESTALE:
            raise OSError(self.failing, os.strerror(self.failing), str(path))
        return self.free if path.is_relative_to(self.memory) else super().free_bytes(path)

    def write(self, path: Path, content: bytes) -> None:
        if self.failing and path.is_relative_to(self.memory):
            raise OSError(self.failing, os.strerror(self.failing), str(path))
        super().write(path, content)

    def remove_file(self, path: Path) -> None:
        if self.does_not_remove and path.is_relative_to(self.memory):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        super().remove_file(path)

    def entries(self, path: Path) -> list[Entry]:
        if self.does_not_list and path.is_relative_to(self.memory):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return super().entries(path)


@pytest.mark.parametrize("alone", [False, True], ids=["copy", "save"])
def test_a_checkpoint_in_memory_that_cannot_be_completed_ends_no_run(
    node: Node, alone: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It is committed: only its marker stays, and the next start completes it."""
    storage = MemoryFault(node.memory)
    job = node.start(storage=storage, save_every=1)
    storage.does_not_remove = True
    if alone:
        save_to_memory(job, 10)
    else:
        job.commit(10)
    storage.does_not_remove = False
    assert caplog.text.count(os.strerror(errno.EIO)) == 1 and node.held() == [10]
    kill(job)
    job = node.start(save_every=1)
    assert (job.step, miniature.leftovers(node.place)) == (10, [])
    kill(job)


class Told(SingleProcess):
    """A rank that remembers what it has told the others."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def gather(self, value: Any) -> list[Any]:
        self.told.append(value)
        return super().gather(value)


def test_of_a_memory_that_cannot_be_listed_all_ranks_learn(node: Node) -> None:
    """Those that wait for what the others have to say would wait for ever."""
    storage = MemoryFault(node.memory)
    storage.does_not_list = True
    ranks = Told()
    with pytest.raises(RunDirectoryUnusable, match="cannot be listed"):
        node.start(storage=storage, ranks=ranks)
    assert "cannot be listed" in ranks.told[-1][1]


def test_a_memory_that_is_too_small_is_left_alone_and_its_size_is_said(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    storage = MemoryFault(node.memory)
    storage.free = 2 << 20
    job = node.start(storage=storage, save_every=1)
    for step in (10, 20):
        job.commit(step)
    save_to_memory(job, 21)
    assert node.held() == []
    assert "two checkpoints need 2 MB; give it 0.1 GB (Docker: --shm-size=0.1g" in caplog.text
    (state,) = job.run._status(RunState.RUNNING).mirrors
    assert "--shm-size" in state.problem
    assert caplog.text.count("nothing more is kept in memory") == 1
    kill(job)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("alone", [False, True], ids=["copy", "save"])
def test_a_memory_that_fails_never_ends_a_run(
    node: Node, number: int, alone: bool, caplog: pytest.LogCaptureFixture
) -> None:
    storage = MemoryFault(node.memory)
    job = node.start(storage=storage, save_every=1)
    job.commit(10)
    storage.failing = number
    for step in (20, 30):
        if alone:
            save_to_memory(job, step)
        else:
            job.commit(step)
    storage.failing = 0
    assert caplog.text.count(os.strerror(number)) == 1
    assert node.held() == [10]
    job.commit(40)
    assert node.held() == ([10, 40] if number == errno.EIO else [10])
    kill(job)
    assert sorted(miniature.committed(node.run_directory).values())[-1] == 40


def test_a_commit_in_memory_that_fails_is_said(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    storage = MemoryFault(node.memory)
    job = node.start(storage=storage, save_every=1)
    wait = job.run.saver.engine.submit_to_memory

    def fail_then(*given: Any) -> None:
        storage.failing = errno.EIO
        wait(*given)

    job.run.saver.engine.submit_to_memory = fail_then  # type: ignore[method-assign]
    save_to_memory(job, 1)
    storage.failing = 0
    assert "could not commit" in caplog.text
    assert node.held() == []
    kill(job)


def test_what_has_changed_since_its_commit_is_not_copied(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    job = node.start(every=2)
    job.commit(10)
    job.commit(20)
    path = node.run_directory / miniature.name(20)
    manifest = read_manifest(job.run.storage, path)
    faults.flip(miniature.native(path))
    memory = job.run.context.memory
    assert memory is not None
    memory.copy(job.run.ranks, path, manifest)
    assert "its content has changed" in caplog.text
    assert node.held() == [10]
    kill(job)


def test_a_later_start_locks_an_earlier_one_out_of_the_memory(node: Node) -> None:
    first = node.start(save_every=1)
    first.commit(10)
    second = node.start(save_every=1)
    with pytest.raises(FencedOff):
        save_to_memory(first, 11)
    memory = first.run.context.memory
    assert memory is not None
    manifest = read_manifest(first.run.storage, node.run_directory / miniature.name(10))
    with pytest.raises(FencedOff):
        memory.copy(first.run.ranks, node.run_directory / miniature.name(10), replace(manifest, step=12))
    assert node.held() == [10]
    save_to_memory(second, 12)
    with pytest.raises(FencedOff):  # where there is something to remove
        memory.copy(first.run.ranks, node.run_directory / miniature.name(10), replace(manifest, step=13))
    assert node.held() == [10, 12]
    submit = second.run.saver.engine.submit_to_memory

    def start_then(*given: Any) -> None:
        third.append(node.start())
        submit(*given)

    third: list[Miniature] = []
    second.run.saver.engine.submit_to_memory = start_then  # type: ignore[method-assign]
    with pytest.raises(FencedOff):
        save_to_memory(second, 14)
    for each in (third[0], second, first):
        kill(each)


def test_a_start_that_comes_between_the_commit_in_memory_and_its_end_locks_the_earlier_one_out(node: Node) -> None:
    """The commit holds: the later start goes on from it."""
    first, later = node.start(save_every=1), list[Miniature]()
    memory = first.run.context.memory
    assert memory is not None
    committed = memory.committed

    def start_then(*given: Any) -> None:
        later.append(node.start(save_every=1))
        committed(*given)

    memory.committed = start_then  # type: ignore[method-assign]
    with pytest.raises(FencedOff):
        save_to_memory(first, 10)
    assert (later[0].step, later[0].text) == (10, "state at 10")
    for each in (*later, first):
        kill(each)


# ---- When


def test_saves_to_memory_are_due_by_steps_and_not_beside_another(node: Node) -> None:
    job = node.start(save_every=2, cadence=Cadence(3))
    found = []
    for step in range(1, 7):
        decision = job.run.steps.end_step(step, 0.0)
        if decision.save:
            job.commit(step)
        if decision.save_to_memory:
            save_to_memory(job, step)
        found.append("disk" if decision.save else "memory" if decision.save_to_memory else "")
    assert found == ["", "memory", "disk", "memory", "", "disk"]
    kill(job)


def test_saves_to_memory_are_due_by_time(node: Node) -> None:
    job = node.start(save_every=timedelta(milliseconds=1))
    time.sleep(0.002)
    assert job.run.steps.end_step(1, 0.0).save_to_memory
    save_to_memory(job, 1)
    time.sleep(0.002)
    assert job.run.steps.end_step(2, 0.0) == Decision(save=False, stop=False, save_to_memory=True)
    kill(job)


def test_a_save_to_memory_that_is_left_out_is_no_measure_of_what_one_costs(node: Node) -> None:
    storage = MemoryFault(node.memory)
    job = node.start(storage=storage, save_every="auto")
    job.commit(1)
    save_to_memory(job, 2)
    cadence = job.run.steps._memory_cadence
    assert cadence is not None
    measured = cadence._saves, cadence._cost
    assert cadence._saves == 1
    storage.free = 0
    save_to_memory(job, 3)
    assert (cadence._saves, cadence._cost) == measured
    kill(job)


def test_the_cadence_of_each_tier_has_its_own_costs_and_failures(node: Node) -> None:
    day = 24 * 3600.0
    history = [
        {"event": "start", "time": 0.0},
        {"event": "commit", "time": day},
        {"event": "start", "time": day, "memory": True},
    ]
    of_disk, of_memory = Cadence("auto"), Cadence("auto", to_memory=True)
    for each in (of_disk, of_memory):
        each.start(0.0, history)
        each.saved(0.0, 1.0)
    assert of_disk.interval == optimal(1.0, 2 * day)
    assert of_memory.interval == optimal(1.0, day)
    cheap = Cadence("auto", to_memory=True)
    assert cheap.interval == SHORTEST_IN_MEMORY.total_seconds()


def test_the_journal_says_whether_the_memory_has_survived(node: Node) -> None:
    for expected in (False, True):
        job = node.start()
        start = [each for each in job.run.control.journal.history() if each["event"] == "start"][-1]
        assert start["memory"] is expected
        job.commit(10)
        kill(job)


# ---- Its directory, and what a user writes


def test_a_directory_that_is_not_this_users_alone_is_refused(tmp_path: Path) -> None:
    mine = tmp_path / "memory" / f"resume-adapters-{os.geteuid()}"
    mine.parent.mkdir()
    memory = [Memory(directory=str(mine.parent))]
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    mine.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsupportedSetting, match="it is a link: remove it"):
        Miniature(tmp_path / "run", mirror=memory)
    mine.unlink()
    mine.write_text("")
    with pytest.raises(UnsupportedSetting, match="it is not a directory"):
        Miniature(tmp_path / "run", mirror=memory)
    mine.unlink()
    mine.mkdir(mode=0o755)
    with pytest.raises(UnsupportedSetting, match="it is open to other users"):
        Miniature(tmp_path / "run", mirror=memory)
    mine.rmdir()
    mine.mkdir(mode=0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: mine.stat().st_uid + 1)
        with pytest.raises(PermissionError, match="it is of the user"):
            make_private_directory(mine)
    with pytest.raises(UnsupportedSetting, match="is not a directory; expected a file system in memory"):
        Miniature(tmp_path / "run", mirror=[Memory(directory=str(tmp_path / "none"))])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Memory(every=0), "positive number of saves"),
        (lambda: Memory(directory="shm"), "an absolute path"),
        (lambda: require_mirrors([Memory(), Memory(every=2)]), "Memory\\(\\) once"),
        (lambda: mirror_of("memory:often"), 'expected "memory", or'),
        (lambda: Miniature(Path("/nowhere"), mirror=[Memory(save_every=0)]), "save_every=0 is invalid"),
    ],
)
def test_what_is_no_tier_in_memory_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UnsupportedSetting, match=message):
        make()


def test_a_text_names_a_tier() -> None:
    found = [mirror_of(text) for text in ("memory", "memory:20", "memory:auto", "memory://bucket")]
    assert found == [Memory(), Memory(save_every=20), Memory(save_every="auto"), Remote("memory://bucket")]
    options = TextOptions(mirror=["memory:5", "memory://bucket"], mirror_every=3, mirror_keep_last=2)
    assert options._mirrors() == (Remote("memory://bucket", 3, KeepLast(2)), Memory(save_every=5))
