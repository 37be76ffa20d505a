"""What is there after a loss of power."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from resume_adapters.core.run_directory.upkeep import prepare
from resume_adapters.core.storage.base import make_durable_directory
from resume_adapters.core.storage.local import LocalStorage


class Noting(LocalStorage):
    """Notes what is forced onto the disk; some directories cannot be."""

    def __init__(self, *closed: Path) -> None:
        super().__init__()
        self.forced: set[Path] = set()
        self.closed = closed

    def sync(self, path: Path) -> None:
        if path in self.closed:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        super().sync(path)
        self.forced.add(path)


def test_the_directories_that_a_framework_has_made_for_a_run_are_forced_onto_the_disk(tmp_path: Path) -> None:
    """By the letter of POSIX a loss of power takes them otherwise, with all commits in them."""
    run = tmp_path / "runs" / "today" / "a"
    run.mkdir(parents=True)
    storage = Noting()
    prepare(storage, run)
    assert {run, run.parent, run.parent.parent, tmp_path} <= storage.forced


def test_a_directory_above_that_is_closed_to_this_user_is_passed_over(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    make_durable_directory(Noting(tmp_path), run / ".resume")
    with pytest.raises(PermissionError):
        make_durable_directory(Noting(run), run / ".other")
