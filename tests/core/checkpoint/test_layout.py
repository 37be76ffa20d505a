"""What stands where the core wants to list, to link, to read or to save."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from resume_adapters.core.checkpoint import layout
from resume_adapters.core.checkpoint.catalog import candidates
from resume_adapters.core.storage.base import leaves_under
from resume_adapters.core.storage.local import LocalStorage
from resume_adapters.errors import ResumeError, RunDirectoryUnusable

import miniature
from miniature import Miniature


def test_a_file_is_not_a_directory_of_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert candidates(LocalStorage(), tmp_path / "missing") == []
    with pytest.raises(RunDirectoryUnusable, match="is a file; expected the directory"):
        candidates(LocalStorage(), tmp_path / "file")


def test_a_directory_that_cannot_be_listed_is_said_to_be_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def scandir(path: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(RunDirectoryUnusable, match="cannot be listed: Permission denied"):
        candidates(LocalStorage(), tmp_path)


@pytest.mark.parametrize("reason", [errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_links_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: int) -> None:
    def symlink(target: str, link: Path) -> None:
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(os, "symlink", symlink)
    assert not LocalStorage().symlink("target", tmp_path / "link")
    run = Miniature(tmp_path / "run")
    run.commit(10)
    run.run.close()
    assert (tmp_path / "run" / "latest").read_text().strip() == "checkpoint-10"
    assert Miniature(tmp_path / "run").step == 10


def test_a_link_that_fails_for_another_reason_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "link").write_text("taken")
    with pytest.raises(FileExistsError):
        LocalStorage().symlink("target", tmp_path / "link")


def test_links_and_pipes_are_none_of_a_directory_s_files(tmp_path: Path) -> None:
    """To read a pipe is to wait for its writer."""
    (tmp_path / "within").mkdir()
    (tmp_path / "within" / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "within" / "file")
    (tmp_path / "linked").symlink_to(tmp_path / "within")
    os.mkfifo(tmp_path / "pipe")
    found = {path.name: kind for path, kind in leaves_under(LocalStorage(), tmp_path)}
    assert found == {"file": "file", "link": "link", "linked": "link", "pipe": "other"}
    assert [path.name for path, _ in layout.files(LocalStorage(), tmp_path)] == ["file"]


@pytest.mark.usefixtures("shape")
def test_a_file_of_a_checkpoint_is_found_through_a_link(tmp_path: Path) -> None:
    run = Miniature(tmp_path / "run")
    run.commit(10)
    link = tmp_path / "elsewhere.ckpt" if miniature.FILES else tmp_path / "elsewhere"
    link.symlink_to(run.run.directory / miniature.name(10))
    assert layout.locate(LocalStorage(), link, "resume/manifest.json").is_file()


def test_what_is_no_checkpoint_is_not_started_from(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(ResumeError, match="it is not a checkpoint"):
        Miniature(tmp_path / "run", resume=str(tmp_path / "mine"))


def test_what_has_the_name_of_a_save_is_moved_and_not_written_into(tmp_path: Path) -> None:
    """A link to another run's checkpoint, and the user's own directory: neither is this run's to change."""
    other, run = Miniature(tmp_path / "other"), Miniature(tmp_path / "run")
    other.commit(10, "another's")
    run.run.directory.joinpath("checkpoint-10").symlink_to(tmp_path / "other" / "checkpoint-10")
    run.run.directory.joinpath("checkpoint-20").mkdir()
    (run.run.directory / "checkpoint-20" / "notes").write_text("kept")
    run.commit(10)
    run.commit(20)
    assert run.committed() == {"checkpoint-10": 10, "checkpoint-20": 20}
    assert Miniature(tmp_path / "other").text == "another's"
    aside = run.run.directory / ".resume" / "set-aside"
    assert (aside / "checkpoint-20.1" / "notes").read_text() == "kept"
    assert (aside / "checkpoint-10.1").is_symlink()
