"""The unfinished run that a launch in a new directory may have meant to continue."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from resume_adapters.core.run_directory.control import ControlDirectory
from resume_adapters.core.run_directory.siblings import unfinished_sibling
from resume_adapters.core.run_directory.status import RunState, RunStatus, signed
from resume_adapters.core.storage.local import LocalStorage

STORAGE = LocalStorage()


def leave(directory: Path, state: RunState = RunState.STOPPED, *, last_commit: int | None = 40) -> Path:
    """Leave a run in a state."""
    STORAGE.make_directory(directory / ".resume")
    control = ControlDirectory(STORAGE, directory, time.time)
    if last_commit is not None:
        control.journal.append("commit", step=last_commit, checkpoint=f"checkpoint-{last_commit}")
    control.status.write(signed(RunStatus(state=state, step=42), time.time()))
    return directory


@pytest.mark.parametrize(
    ("earlier", "now"),
    [
        ("2026-11-21/09-12-44/out", "2026-11-22/10-03-05/out"),
        ("2026-11-21/09-12-44/logs/version_0/checkpoints", "2026-11-22/10-03-05/logs/version_0/checkpoints"),
        ("run_1763712000", "run_1763799999"),
        ("job_4711", "job_48120"),
        ("20261121-091244-gpt", "20261122-100305-gpt"),
        ("4711/0_result", "4712/0_result"),
        ("version_9", "version_10"),
        ("exp2/weights", "exp3/weights"),
        ("v0", "v1"),
    ],
)
def test_one_that_differs_in_its_digits_is_found(earlier: str, now: str, tmp_path: Path) -> None:
    expected = leave(tmp_path / earlier)
    leave(tmp_path / "other-name-2026")
    found = unfinished_sibling(STORAGE, tmp_path / now)
    assert found is not None and found[:3] == (expected, "stopped", 42)


def test_the_latest_of_several_is_found_and_not_the_run_itself(tmp_path: Path) -> None:
    for name in ("run_2001", "run_2003", "run_2002"):
        leave(tmp_path / name)
        time.sleep(0.01)
    leave(tmp_path / "run_2004")
    found = unfinished_sibling(STORAGE, tmp_path / "run_2004")
    assert found is not None and found.path.name == "run_2002"


def test_one_behind_a_link_to_the_newest_is_found(tmp_path: Path) -> None:
    """As anomalib leads to the directory that it makes for each launch."""
    for version in ("v0", "v1"):
        (tmp_path / version / "weights" / "lightning").mkdir(parents=True)
    (tmp_path / "latest").symlink_to("v1")
    leave(tmp_path / "v0" / "weights" / "lightning")
    found = unfinished_sibling(STORAGE, tmp_path / "latest" / "weights" / "lightning")
    assert found is not None and found.path == tmp_path / "v0" / "weights" / "lightning"


@pytest.mark.parametrize("name", ["a", "lr=0.0001", "lr=3"])
def test_a_name_that_says_no_time_has_no_sibling(name: str, tmp_path: Path) -> None:
    leave(tmp_path / "runs" / "lr=0.0003")
    leave(tmp_path / "runs" / "lr=4")
    assert unfinished_sibling(STORAGE, tmp_path / "runs" / name) is None


@pytest.mark.parametrize(
    ("state", "last_commit"),
    [(RunState.FINISHED, 40), (RunState.HALTED, 40), (RunState.RUNNING, 40), (RunState.STOPPED, None)],
)
def test_a_run_that_nobody_would_continue_is_none(state: RunState, last_commit: int | None, tmp_path: Path) -> None:
    leave(tmp_path / "run_2001", state, last_commit=last_commit)
    assert unfinished_sibling(STORAGE, tmp_path / "run_2002") is None


def test_another_users_run_is_none(tmp_path: Path) -> None:
    leave(tmp_path / "user2001" / "project" / "results" / "logs" / "out")
    assert unfinished_sibling(STORAGE, tmp_path / "user2002" / "project" / "results" / "logs" / "out") is None


def test_one_that_was_killed_within_its_first_second_is_found_by_its_commit(tmp_path: Path) -> None:
    directory = leave(tmp_path / "run_2001", last_commit=43)
    found = unfinished_sibling(STORAGE, tmp_path / "run_2002")
    assert found is not None and found[:3] == (directory, "stopped", 43)


@pytest.mark.parametrize(("silent", "left"), [(5.0, None), (90.0, "silent for 90 s")])
def test_one_that_another_host_left_is_found_once_it_is_silent(silent: float, left: str | None, tmp_path: Path) -> None:
    directory = leave(tmp_path / "run_2001", RunState.RUNNING)
    file = ControlDirectory(STORAGE, directory, time.time).status
    status = file.read()
    assert status is not None
    file.write(replace(status, host="another", updated=time.time() - silent))
    found = unfinished_sibling(STORAGE, tmp_path / "run_2002")
    assert (found and found.left) == left


def test_what_cannot_be_listed_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(tmp_path / "run_2001")
    (tmp_path / "run_2003").write_text("a file")
    assert unfinished_sibling(STORAGE, tmp_path / "run_2002" / "out") is None
    assert unfinished_sibling(STORAGE, tmp_path / "missing" / "run_2002") is None
    assert os.listdir(tmp_path / "run_2001") == [".resume"]
