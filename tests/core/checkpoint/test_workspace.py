"""Where a checkpoint begins is made ahead of its save, and the training does not wait for the disk."""

from __future__ import annotations

import errno
import shutil
import threading
from pathlib import Path

import pytest

from resume_adapters.core.checkpoint.commit import Workspaces
from resume_adapters.core.checkpoint.layout import is_unfinished
from resume_adapters.core.storage.base import Storage
from resume_adapters.core.storage.local import LocalStorage
from resume_adapters.errors import SaveFailed

import faults
import miniature
from miniature import Miniature

pytestmark = pytest.mark.usefixtures("shape")


def begun(directory: Path) -> list[str]:
    """Return what has begun in a run directory."""
    found = (directory / ".resume").glob("begin-*")
    return sorted(path.relative_to(each).as_posix() for each in found for path in each.rglob("*"))


class Watched(LocalStorage):
    """A local disk that counts how often the training waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0

    def sync(self, path: Path) -> None:
        self.waits += threading.current_thread() is threading.main_thread()
        super().sync(path)


def test_only_the_first_save_waits_for_the_disk(tmp_path: Path) -> None:
    storage = Watched()
    job = Miniature(tmp_path, storage=storage)
    started = storage.waits
    job.commit(10)
    assert storage.waits > started
    waits = storage.waits
    job.commit(20)
    job.commit(30)
    # Of a checkpoint that is a file, what is beside it must be renamed before it is.
    assert storage.waits - waits == (4 if miniature.FILES else 0)
    job.run.close()
    assert begun(tmp_path) == [] and Miniature(tmp_path).step == 30


def test_nothing_is_made_ahead_of_a_save_that_does_not_come(tmp_path: Path) -> None:
    job = Miniature(tmp_path)
    content = miniature.MiniatureContent(job.run, "last", 10, None, None)
    job.run.saver.save(miniature.name(10), 10, content, is_file=miniature.FILES, is_last=True)
    job.run.saver.flush()
    assert begun(tmp_path) == []
    job.run.close()


def test_the_marker_has_the_name_of_its_checkpoint_when_it_is_committed(tmp_path: Path) -> None:
    """Otherwise what is left undone after a commit would not be done by the next start."""
    job = Miniature(tmp_path, storage=(storage := faults.FailingStorage(errno.EIO, 10**9, only=("remove_file",))))
    job.commit(10)
    storage.fail_at = len(storage.operations)
    with pytest.raises(SaveFailed, match="is committed, but what follows"):
        job.commit(20)
    assert storage.operations[-1][1].name == "pending"
    assert is_unfinished(LocalStorage(), tmp_path / miniature.name(20))


@pytest.fixture
def workspaces(tmp_path: Path) -> Workspaces:
    return Workspaces(LocalStorage(), tmp_path)


@pytest.mark.parametrize("is_file", [False, True])
def test_what_was_made_ahead_is_taken_under_the_name(workspaces: Workspaces, tmp_path: Path, is_file: bool) -> None:
    workspaces.make_ahead(is_file=is_file)
    place = workspaces.take("a", is_file=is_file)
    assert begun(tmp_path) == (["a.resume", "a.resume/pending"] if is_file else ["a", "a/resume", "a/resume/pending"])
    assert place.name == "a" and place.parent.parent == tmp_path / ".resume"
    assert workspaces.take("b", is_file=is_file).parent != place.parent


def test_what_was_made_ahead_for_the_other_kind_is_removed(workspaces: Workspaces, tmp_path: Path) -> None:
    workspaces.make_ahead(is_file=True)
    workspaces.take("a", is_file=False)
    assert begun(tmp_path) == ["a", "a/resume", "a/resume/pending"]


def test_what_somebody_has_removed_is_made_again(workspaces: Workspaces, tmp_path: Path) -> None:
    workspaces.make_ahead(is_file=False)
    shutil.rmtree(tmp_path / ".resume")
    assert (workspaces.take("a", is_file=False) / "resume" / "pending").is_file()


def test_a_disk_that_is_full_is_the_next_saves_error(tmp_path: Path) -> None:
    full: Storage = faults.no_space(lasting=True)
    workspaces = Workspaces(full, tmp_path)
    workspaces.make_ahead(is_file=False)
    with pytest.raises(OSError, match="No space"):
        workspaces.take("a", is_file=False)


def test_what_cannot_be_removed_at_the_end_is_left_to_the_next_start(tmp_path: Path) -> None:
    storage = faults.FailingStorage(errno.EIO, 0, only=("remove_file",))
    workspaces = Workspaces(storage, tmp_path)
    workspaces.make_ahead(is_file=False)
    workspaces.close()
    workspaces.close()
    assert begun(tmp_path) == ["next", "next/resume", "next/resume/pending"]
