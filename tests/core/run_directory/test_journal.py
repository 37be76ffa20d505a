"""A journal that has grown large is trimmed by the next start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from resume_adapters import KeepLast
from resume_adapters.core.run_directory import journal

from miniature import Miniature


def events(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / ".resume" / "journal.jsonl").read_text().splitlines()]


def test_the_first_the_last_the_stops_and_the_commits_that_count_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Miniature(tmp_path, keep=KeepLast(2))
    for number in range(8):
        job.commit(number * 10)
        job.run.control.journal.append("failed" if number == 3 else "resume", step=number)
    job.run.close()
    monkeypatch.setattr(journal, "_FIRST", 2)
    monkeypatch.setattr(journal, "_LAST", 1)
    before = events(tmp_path)
    Miniature(tmp_path).run.close()
    assert events(tmp_path)[: len(before)] == before, "it is not large"
    monkeypatch.setattr(journal, "_LARGE", 100)
    Miniature(tmp_path).run.close()
    kept = [(each["event"], each["step"]) for each in events(tmp_path)]
    assert kept == [
        ("start", 0),
        ("commit", 0),
        ("failed", 3),
        ("commit", 60),
        ("commit", 70),
        ("start", 70),
        ("start", 70),
    ]
