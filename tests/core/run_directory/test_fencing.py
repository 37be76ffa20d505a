"""Which start owns a run directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from resume_adapters.core.run_directory.control import Fencing
from resume_adapters.core.storage.base import is_temporary, temporary_path
from resume_adapters.core.storage.local import LocalStorage
from resume_adapters.errors import FencedOff, RunDirectoryUnusable


def test_a_command_of_the_shell_changes_nothing_once_a_run_has_started(tmp_path: Path) -> None:
    (tmp_path / ".resume").mkdir()

    def fencing() -> Fencing:
        return Fencing(LocalStorage(), tmp_path / ".resume", lambda: 0.0)

    for _ in range(2):  # a directory that no run has started, and one that a run has left
        fence = fencing().no_start_from_now()
        fence()
        fencing().take_over()
        with pytest.raises(FencedOff, match=r"start \d \(process \d+ on .+\) has taken .+ over meanwhile"):
            fence()


def test_two_starts_share_no_temporary_file(tmp_path: Path) -> None:
    one, two = (temporary_path(tmp_path / "generation") for _ in range(2))
    assert one != two
    assert is_temporary(one.name) and is_temporary(".generation.tmp") and not is_temporary("generation")


def test_a_rank_that_does_not_lead_knows_of_a_later_start_by_its_number(tmp_path: Path) -> None:
    first, later = (Fencing(LocalStorage(), tmp_path, lambda: 0.0) for _ in range(2))
    generation = first.take_over()
    later.require_latest(generation)
    later.take_over()
    with pytest.raises(FencedOff, match="start 2"):
        first.require_latest(generation)


@pytest.mark.parametrize("field", ["generation", "started"])
@pytest.mark.parametrize("value", [-1, 1 << 62, 10**400, 1e308, None, []])
def test_a_start_that_no_run_can_have_is_passed_over(tmp_path: Path, field: str, value: Any) -> None:
    """The checkpoints of the start after it could not be read."""
    written = {"generation": 3, "token": "x", "started": 1.0, field: value}
    (tmp_path / "generation").write_text(json.dumps(written))
    fencing = Fencing(LocalStorage(), tmp_path, lambda: 0.0)
    assert fencing.take_over() == 1 and fencing.is_owned()


def test_after_the_last_start_that_a_run_can_have_there_is_none(tmp_path: Path) -> None:
    fencing = Fencing(LocalStorage(), tmp_path, lambda: 0.0)
    file = tmp_path / "generation"
    file.write_text(json.dumps({"generation": 10**12 - 1, "token": "somebody's"}))
    with pytest.raises(RunDirectoryUnusable, match=r"generation says that start 9+ has been there.*remove it"):
        fencing.take_over()
    file.unlink()
    assert fencing.take_over() == 1 and fencing.is_owned()
