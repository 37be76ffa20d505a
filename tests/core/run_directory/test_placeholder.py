"""What stands in a run directory before the first commit, so that scripts do not refuse it."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest

from resume_adapters.core.checkpoint.layout import CheckpointState, pending_text, state_of
from resume_adapters.core.storage.local import LocalStorage
from resume_adapters.errors import CheckpointDamaged, RunDirectoryUnusable

from faults import Crash, CrashingStorage
from miniature import Foreign, ForeignStep, Miniature, leftovers

NAME = "checkpoint-0"


def start(directory: Path, **options: Any) -> Miniature:
    return Miniature(directory, placeholder=NAME, **options)


def is_accepted(directory: Path) -> bool:
    """Return whether the examples of transformers 4 would start: they look for names, and for anything else."""
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    return not names or any(re.search(r"^checkpoint\-(\d+)$", name) and (directory / name).is_dir() for name in names)


@pytest.mark.parametrize("torn", [False, True])
def test_a_script_starts_wherever_it_was_killed(torn: bool, tmp_path: Path) -> None:
    counted = CrashingStorage()
    start(tmp_path / "counted", storage=counted).commit(1)
    assert not (tmp_path / "counted" / NAME).exists()
    for at in range(len(counted.operations)):
        directory = tmp_path / str(at)
        for may_end in (False, True):  # the second launch finds the directories there, and has less to do
            storage = CrashingStorage(at, torn=torn)
            with contextlib.suppress(Crash) if may_end else pytest.raises(Crash):
                start(directory, storage=storage).commit(1)
            assert is_accepted(directory), f"killed before {storage.operations[-1]}"
        last = start(directory)
        last.commit(2)
        assert set(last.committed()) >= {"checkpoint-2"} and not leftovers(directory)
        assert not (directory / NAME).exists()
        last.run.close()


def test_it_stands_only_where_no_checkpoint_is(tmp_path: Path) -> None:
    plain = Miniature(tmp_path)
    assert not (tmp_path / NAME).exists()
    plain.commit(1)
    plain.run.close()
    start(tmp_path).run.close()
    assert not (tmp_path / NAME).exists()
    start(tmp_path, resume="scratch!").run.close()
    assert state_of(LocalStorage(), tmp_path / NAME) is CheckpointState.PENDING
    assert [path.name for path in (tmp_path / ".resume" / "set-aside").iterdir()] == ["checkpoint-1.1"]
    start(tmp_path, resume="scratch!").run.close()
    assert len(list((tmp_path / ".resume" / "set-aside").iterdir())) == 1


def test_what_a_user_has_under_the_name_stays(tmp_path: Path) -> None:
    for index, make in enumerate((lambda path: path.write_text("mine"), lambda path: _directory(path / "mine"))):
        directory = tmp_path / str(index)
        directory.mkdir()
        make(directory / NAME)
        before = sorted(directory.rglob(f"{NAME}*"))
        job = start(directory)
        job.commit(1)
        assert sorted(directory.rglob(f"{NAME}*")) == before
        job.run.close()


def _directory(path: Path) -> None:
    path.mkdir(parents=True)


def test_a_real_checkpoint_of_that_name_stays(tmp_path: Path) -> None:
    job = start(tmp_path)
    job.commit(0)
    assert job.committed() == {NAME: 0}
    job.run.close()


def test_a_checkpoint_of_the_bare_framework_is_one(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-7").mkdir()
    foreign = Foreign(lambda path: ForeignStep(7) if path.name == "checkpoint-7" else None)
    job = start(tmp_path, foreign=foreign)
    assert job.choice.checkpoint is not None and not (tmp_path / NAME).exists()
    job.run.close()


def test_a_given_path_that_was_only_begun_starts_from_zero(tmp_path: Path) -> None:
    """The script has found the placeholder, or the first checkpoint before its commit, and gives it as a path."""
    start(tmp_path).run.close()
    for name in (NAME, "checkpoint-5"):
        (tmp_path / name / "resume").mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "resume" / "pending").write_bytes(pending_text(name))
        job = start(tmp_path, resume=tmp_path / name)
        assert job.choice.checkpoint is None and (tmp_path / NAME).is_dir()
        job.run.close()
    with pytest.raises(CheckpointDamaged):
        start(tmp_path / "b", resume=tmp_path / NAME)


def test_a_run_directory_that_cannot_be_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a file")
    with pytest.raises(RunDirectoryUnusable, match="is a file"):
        start(tmp_path / "a")
