"""What cannot be removed (another user's files, a file that NFS keeps) stays, and training goes on."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from resume_adapters import KeepLast
from resume_adapters.core.checkpoint.layout import PENDING
from resume_adapters.core.checkpoint.remove import delete, set_aside
from resume_adapters.core.run_directory.status import RunState
from resume_adapters.core.storage.local import LocalStorage
from resume_adapters.errors import SaveFailed

import miniature
from faults import Disturbed, refuse
from miniature import Miniature

pytestmark = pytest.mark.usefixtures("shape")

HELD = (errno.EACCES, errno.EPERM, errno.EBUSY)


class Foreign(Disturbed):
    """A disk on which another user owns all that is named ``theirs``, and what is below it.

    Attributes:
        number: what the system says.
        roots: also the checkpoints themselves cannot be moved.
        sealed: their directories cannot be listed either.
    """

    def __init__(self, number: int = errno.EACCES, *, roots: bool = False, sealed: bool = False) -> None:
        super().__init__(self._look)
        self.number, self.roots = number, roots
        self.refused = ("remove_file", "remove_directory", *(["entries"] if sealed else []))

    def _look(self, operation: str, path: Path) -> None:
        is_theirs = "theirs" in path.parts or "theirs" in path.name
        is_root = self.roots and "remove-" in path.name and "checkpoint-20" not in path.name
        if (is_theirs and operation in self.refused) or (is_root and operation == "replace"):
            refuse(self.number, path)


def leave(checkpoint: Path) -> None:
    """Leave what an evaluation in a container leaves: a directory of another user, with a file."""
    (miniature.own(checkpoint) / "theirs").mkdir()
    (miniature.own(checkpoint) / "theirs" / "scores.json").write_text("{}")


def test_a_checkpoint_whose_marker_is_in_use_stays_as_it_is(tmp_path: Path) -> None:
    """It takes two renames to remove a file and what lies beside it; a directory needs one."""
    job = Miniature(tmp_path)
    job.commit(10)
    job.run.close()
    checkpoint = tmp_path / miniature.name(10)
    storage = Disturbed(lambda name, path: (name, path.name) == ("replace", PENDING) and refuse(errno.EBUSY, path))
    error = delete(storage, checkpoint, lambda: None)
    assert (error is not None and error.errno == errno.EBUSY) == miniature.FILES
    assert checkpoint.exists() == (miniature.own(checkpoint) / "manifest.json").exists() == miniature.FILES


def status(directory: Path) -> int:
    found = json.loads((directory / ".resume" / "status.json").read_bytes())
    return int(found.get("unremovable", 0))


@pytest.mark.parametrize("number", HELD)
def test_a_save_and_a_start_go_on_where_an_old_checkpoint_cannot_be_removed(
    tmp_path: Path, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    job = Miniature(tmp_path, storage=Foreign(number), keep=KeepLast(1))
    job.commit(10)
    leave(tmp_path / miniature.name(10))
    for step in (20, 30):
        job.commit(step)
    job.run.set_state(RunState.STOPPED)
    job.run.close()
    assert set(job.committed()) == {miniature.name(30)}
    left = [path.name for path in (tmp_path / ".resume").rglob("*") if path.is_file() and "remove-" in str(path)]
    assert left == ["scores.json"], "all the rest is removed"
    assert caplog.text.count("could not be removed") == 1 and os.strerror(number) in caplog.text
    assert status(tmp_path) == 1
    again = Miniature(tmp_path, storage=Foreign(number), keep=KeepLast(1))
    assert again.step == 30
    again.commit(40)
    again.run.set_state(RunState.STOPPED)
    again.run.close()
    assert (set(again.committed()), status(tmp_path)) == ({miniature.name(40)}, 1)
    assert caplog.text.count("could not be removed") == 2
    then = Miniature(tmp_path)
    then.run.set_state(RunState.STOPPED)
    assert not miniature.leftovers(tmp_path)
    assert status(tmp_path) == 0


def test_a_checkpoint_of_a_name_whose_leftover_stays_can_be_removed_too(tmp_path: Path) -> None:
    job = Miniature(tmp_path, storage=Foreign(sealed=True), keep=KeepLast(1))
    for step, under in ((10, 10), (20, 20), (30, 10), (40, 40)):
        job.commit(step, under=miniature.name(under))
        if under == 10:
            leave(tmp_path / miniature.name(10))
    job.run.close()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(miniature.name(10))]
    left = list((tmp_path / ".resume").glob("remove-*"))
    assert len(left) == 2


def test_a_checkpoint_that_cannot_be_moved_is_kept_and_said_to_be(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Miniature(tmp_path, storage=Foreign(roots=True), keep=KeepLast(1))
    for step in (10, 20, 30):
        job.commit(step)
    plan = job.run.pruner.prune(job.run.storage_group, None)
    if not miniature.FILES:  # one that is a file is no longer committed, so the next start tries again
        assert plan.keep[miniature.name(10)] == "could not be removed: Permission denied"
    assert not plan.remove
    assert caplog.text.count("could not be removed") == 1
    job.run.set_state(RunState.STOPPED)
    job.run.close()
    assert status(tmp_path) == 1
    assert Miniature(tmp_path, storage=Foreign(roots=True)).step == 30


def test_an_unfinished_checkpoint_that_cannot_be_moved_does_not_stop_a_start(tmp_path: Path) -> None:
    Miniature(tmp_path).commit(10)
    pending = miniature.own(tmp_path / miniature.name(15))
    pending.mkdir(parents=True)
    (pending / "pending").write_text("begun")
    job = Miniature(tmp_path, storage=Foreign(roots=True))
    assert job.step == 10
    if miniature.FILES:  # what is left has the name of a directory that the save needs
        with pytest.raises(SaveFailed, match=r"checkpoint-15.*Directory not empty"):
            job.commit(15)
        return
    job.commit(15)
    job.run.close()
    assert set(job.committed()) == {miniature.name(10), miniature.name(15)}


def test_a_disk_that_fails_is_no_file_of_somebody_else(tmp_path: Path) -> None:
    job = Miniature(tmp_path, storage=Foreign(errno.EIO), keep=KeepLast(1))
    job.commit(10)
    leave(tmp_path / miniature.name(10))
    with pytest.raises(SaveFailed, match="Input/output error"):
        job.commit(20)
    job.run.close()
    other = Miniature(tmp_path / "other", storage=Foreign(errno.EIO, roots=True), keep=KeepLast(1))
    other.commit(10)
    with pytest.raises(SaveFailed, match="Input/output error"):
        other.commit(20)
    other.run.close()


def test_what_is_set_aside_again_under_a_name_gets_another_number(tmp_path: Path) -> None:
    found = []
    for content in ("first", "second"):
        (tmp_path / "checkpoint-1").mkdir()
        (tmp_path / "checkpoint-1" / "model.bin").write_text(content)
        found.append(set_aside(LocalStorage(), tmp_path / "checkpoint-1", lambda: None))
    assert [path.name for path in found] == ["checkpoint-1.1", "checkpoint-1.2"]
    assert [(path / "model.bin").read_text() for path in found] == ["first", "second"]
