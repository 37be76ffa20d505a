"""A save and a start of the Trainer do not pass through more of this package than they did."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

RULER = Path(__file__).parents[2] / "tools" / "size.py"

FRAMES = 24
"""The frames of this package above the Trainer's write."""

FILES = {"save": 70, "start": 115}
"""The files of this package that each enters on the thread that trains."""


@pytest.mark.thorough
@pytest.mark.skipif(not RULER.is_file(), reason="a wheel brings no tools")
def test_what_a_save_and_a_start_enter_does_not_grow(tmp_path: Path) -> None:
    rows = dict(runpy.run_path(str(RULER))["trace"](tmp_path))
    assert 0 < int(rows["frames of ours above the Trainer's write"]) <= FRAMES
    for name, most in FILES.items():
        files, functions = map(int, rows[f"files and functions that a {name} enters"].split("; "))
        assert 10 < files <= most and functions > files
