"""Which start owns a run directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from resume_adapters.core.run_directory.fencing import Fencing
from resume_adapters.core.storage.base import is_temporary, temporary_path
from resume_adapters.core.storage.local import LocalStorage
from resume_adapters.errors import FencedOff


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
