"""What goes wrong in the background comes with the next verb, once."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from resume_adapters import KeepAll, KeepLast
from resume_adapters.core.recovery.attempt import LeftByPeer
from resume_adapters.core.run_directory.status import RunState
from resume_adapters.core.saving.engine import THREAD_NAME
from resume_adapters.errors import SaveFailed
from waiting import LIMIT, until

import faults
from miniature import Miniature, left_open, open_files


def settled(job: Miniature) -> None:
    """Wait for the commits in flight, and raise nothing."""
    for each in job.run.saver.engine.in_flight:
        each.wait()


@pytest.fixture
def failing(tmp_path: Path) -> Iterator[Miniature]:
    """A run whose second commit fails in the background, unseen so far."""
    storage = faults.Disturbed()
    job = Miniature(tmp_path, storage=storage)
    job.commit(10)
    storage.before = lambda name, path: (name, path.name) == ("sync", "model.bin") and faults.refuse(errno.EIO)
    job.save(20)
    settled(job)
    storage.before = lambda name, path: None
    yield job


def test_an_error_of_the_commit_is_raised_by_the_next_save_once(failing: Miniature) -> None:
    with pytest.raises(SaveFailed, match="checkpoint-20"):
        failing.save(30)
    failing.commit(30)
    assert failing.committed() == {"checkpoint-10": 10, "checkpoint-30": 30}


def test_an_error_of_the_commit_is_raised_by_flush(failing: Miniature) -> None:
    with pytest.raises(SaveFailed, match="checkpoint-20"):
        failing.run.saver.flush()
    failing.run.saver.flush()


def test_an_error_of_the_commit_is_not_lost_by_close(failing: Miniature) -> None:
    with pytest.raises(SaveFailed, match="checkpoint-20"):
        failing.run.close()
    failing.run.close()


def test_where_the_system_has_no_thread_left_the_training_commits_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Miniature(tmp_path)
    native = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == THREAD_NAME:
            raise RuntimeError("can't start new thread")
        native(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    job.save(10)
    assert job.committed() == {"checkpoint-10": 10}
    job.run.saver.flush()
    job.run.close()


class Blocked(faults.Disturbed):
    """A disk on which one file cannot be synced, and the removal of the first checkpoint waits to be let go."""

    def __init__(self) -> None:
        super().__init__(self._look)
        self.go_on, self.name = threading.Event(), "no file"

    def _look(self, operation: str, path: Path) -> None:
        if operation == "replace" and path.name.startswith("remove-") and path.name.endswith("checkpoint-10"):
            assert self.go_on.wait(LIMIT)
        if (operation, path.name) == ("sync", self.name):
            faults.refuse(errno.EIO)


def test_an_error_is_raised_once_all_that_was_submitted_is_done(tmp_path: Path) -> None:
    storage = Blocked()
    job = Miniature(tmp_path, storage=storage, keep=KeepAll())
    for step in (10, 20):
        job.commit(step)
    storage.name = "model.bin"
    job.save(30)
    settled(job)
    job.run.pruner.keep = KeepLast(1)
    job.run.saver.prune_later()
    prune = job.run.saver.engine.in_flight[-1]
    threading.Timer(0.2, storage.go_on.set).start()
    with pytest.raises(SaveFailed, match="checkpoint-30"):
        job.run.saver.flush()
    assert prune.is_done and set(job.committed()) == {"checkpoint-20"}


def test_after_a_failed_commit_the_last_one_is_the_one_before(failing: Miniature) -> None:
    with pytest.raises(SaveFailed):
        failing.run.saver.flush()
    assert failing.run.last_commit == 10
    failing.run.set_state(RunState.FAILED, step=20)
    assert json.loads((failing.run.directory / ".resume" / "status.json").read_bytes())["last_commit"] == 10


def test_pruning_can_wait_for_the_commit_and_its_error_comes_with_the_next_save(tmp_path: Path) -> None:
    storage = faults.FailingStorage(errno.EIO, 10**9)
    job = Miniature(tmp_path, storage=storage, keep=KeepAll())
    for step in (10, 20):
        job.commit(step)
    job.run.pruner.keep = KeepLast(1)
    storage.fail_at = len(storage.operations)
    job.run.saver.prune_later()
    with pytest.raises(SaveFailed, match=r"could not prune .*Nothing is lost"):
        job.run.saver.flush()
    storage.fail_at = None
    job.run.saver.prune_later(best="checkpoint-10")
    job.run.saver.flush()
    assert set(job.committed()) == {"checkpoint-10", "checkpoint-20"}
    job.run.saver.prune_later()
    job.run.saver.flush()
    assert set(job.committed()) == {"checkpoint-20"}


@pytest.mark.parametrize("at", [("write", "rank-00000.json"), ("sync", "model.bin"), ("write", "pending")])
def test_a_save_that_an_attempt_leaves_keeps_no_directory_open(at: tuple[str, str], tmp_path: Path) -> None:
    def leave(operation: str, path: Path) -> None:
        if (operation, path.name) == at:
            raise LeftByPeer

    storage = faults.Disturbed()
    job = Miniature(tmp_path, storage=storage)
    job.commit(10)
    before = open_files()
    storage.before = leave
    with pytest.raises(LeftByPeer):
        job.commit(20)
    until(lambda: not left_open(before), lambda: left_open(before))


def test_a_file_that_the_script_has_removed_is_no_fault_of_the_disk(tmp_path: Path) -> None:
    def tidy(operation: str, path: Path) -> None:
        if (operation, path.name) == ("sync", "model.bin"):
            path.unlink()

    job = Miniature(tmp_path, storage=faults.Disturbed(tidy))
    with pytest.raises(SaveFailed, match="Something has removed that file since it was saved"):
        job.commit(10)
